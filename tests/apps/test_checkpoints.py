"""Files of prompts that go on inside a row. Oracle: the results of a run that nothing ends, but for their times."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from job_runs import lines, write_rows
from kill_runs import SETTINGS
from ringkv import Engine, RingConfig, SamplingParams, Snapshot
from ringkv.apps.jobs.checkpoints import Checkpoints
from ringkv.apps.jobs.job import Job
from ringkv.files import beside
from tiny import tiny_config, tiny_decoder, tiny_weights

PARAMS = SamplingParams(n=2, seed=7, temperature=1.0, ignore_eos=True)
CONFIG = tiny_config(layers=2)
WEIGHTS = tiny_weights(CONFIG, torch.float32)
ROWS = [{"id": f"row {at}", "prompt": [at + 1] * (5 + at), "params": {"max_tokens": 40 + 9 * at}} for at in range(4)]


class Stop(Exception):
    pass


class Asked:
    """An engine that notes its prompts, and ends the run after so many snapshots."""

    def __init__(self, most=10**9):
        ring = RingConfig(budget=24, window=8)
        self.engine = Engine(tiny_decoder(CONFIG, WEIGHTS), ring=ring, lanes=3)
        self.prompts, self.left = [], most

    def iterate(self, prompts, params, *, on_snapshot=None, **options):
        def noted():
            for prompt in prompts:
                self.prompts.append(prompt)
                yield prompt

        def told(index, snapshot):
            on_snapshot(index, snapshot)
            self.left -= 1
            if not self.left:
                raise Stop

        return self.engine.iterate(noted(), params, on_snapshot=told, **options)


def run(source, output, asked, every=10):
    checkpoints = Checkpoints(output, every, asked.engine.load)
    with Job(source, output, PARAMS, SETTINGS) as job:
        return job.run(asked.iterate, checkpoints=checkpoints)


def results(output):
    """Each result but for its times, by row and sample."""
    found = {}
    for line in lines(output):
        del line["ringkv"]["timing"]
        found[line["id"], line["ringkv"]["sample"]] = line
    return found


def states(output):
    return sorted(beside(output, ".states").glob("*"))


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "in.jsonl", *ROWS)


@pytest.fixture
def whole(source, tmp_path):
    run(source, tmp_path / "whole.jsonl", Asked(), every=0)
    return results(tmp_path / "whole.jsonl")


def test_a_run_goes_on_inside_its_rows(source, tmp_path, whole):
    """Ended at five moments one after the other: what was kept is not generated again."""
    output = tmp_path / "out.jsonl"
    for ends in (1, 2, 3, 2, 4):
        asked = Asked(ends)
        with pytest.raises(Stop):
            run(source, output, asked)
        kept = [each for each in asked.prompts if isinstance(each, Snapshot)]
        assert ends == 1 or kept
        assert all(len(each.tokens) % 10 == 0 for each in kept)
        assert all(path.stat().st_mode & 0o77 == 0 for path in states(output))
    status = run(source, output, Asked())
    assert (status.done, status.failed, status.unkept) == (8, 0, None)
    assert results(output) == whole
    assert not beside(output, ".states").exists()


def test_what_cannot_be_used_begins_anew(source, tmp_path, whole):
    """A torn file, one of other params, one of another model; and none is looked for where they are off."""
    output = tmp_path / "out.jsonl"
    with pytest.raises(Stop):
        run(source, output, Asked(5))
    first, second, third = states(output)[:3]
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(third.read_bytes())
    off = tmp_path / "off.jsonl"
    for path in (output, beside(output, ".json")):
        shutil.copy(path, tmp_path / path.name.replace("out", "off"))
    shutil.copytree(beside(output, ".states"), beside(off, ".states"))
    status = run(source, output, Asked())
    assert "this row begins anew" in status.unkept
    assert results(output) == whole
    asked = Asked()
    assert run(source, off, asked, every=0).unkept is None
    assert not any(isinstance(each, Snapshot) for each in asked.prompts)
    assert results(off) == whole


def test_a_full_disk_loses_nothing(source, tmp_path, whole):
    """A limit on the size of files, above the results and below a snapshot; and a folder that is a file."""
    output, before = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        status = run(source, output, Asked())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert status.unkept.endswith("File too large")
    assert (status.done, status.problem) == (8, None)
    assert results(output) == whole
    assert not beside(output, ".states").exists()
    other = tmp_path / "other.jsonl"
    beside(other, ".states").write_text("in the way")
    status = run(source, other, Asked())
    assert "Not a directory" in status.unkept
    assert results(other) == whole


def test_killed_at_any_moment(tmp_path, tiny_chat_checkpoint):
    """While results and states are written. The environment may ask for more than these few: RINGKV_KILLS=50."""
    count = int(os.environ.get("RINGKV_KILLS", "6"))
    model, seed = tiny_chat_checkpoint, count
    rng = random.Random(seed)
    rows = [{"prompt": "the quick fox" * (1 + at % 4), "params": {"max_tokens": 30 + 7 * at}} for at in range(5)]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    moments = [{"all": rng.randrange(2_000, 700_000)} for _ in range(count)]
    script = Path(__file__).parents[1] / "helpers" / "kill_runs.py"
    unbroken = tmp_path / "unbroken.jsonl"
    command = [
        sys.executable,
        str(script),
        str(model),
        str(source),
        str(output),
        str(unbroken),
        json.dumps(moments),
        "6",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = [end for end, _ in json.loads(done.stdout)]
    assert (ends[0], ends[-1]) == (0, 0)
    assert results(output) == results(unbroken)
    assert not states(output)
    assert ends.count(-9) >= count // 2


def test_the_engine_is_asked_as_before_where_they_are_off(source, tmp_path):
    asked = functools.partial(run, source, tmp_path / "out.jsonl")
    plain = Asked()
    plain.iterate = plain.engine.iterate
    assert asked(plain, every=0).done == 8
