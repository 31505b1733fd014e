"""``generate --save``, ``--resume``, ``--fork`` and ``ringkv state``. Oracle: one run of as many tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringkv import RingkvError, Snapshot
from ringkv.apps.generate import Going, run_prompt
from ringkv.apps.options import Options
from ringkv.apps.state.terminal import show_state

RING = {"budget": 24, "window": 4, "threads": 1}


@pytest.fixture
def generate(tiny_chat_checkpoint, capsys):
    """Runs ``generate`` in this process; gives its exit code, stdout and stderr."""

    def run(prompt=None, *, n=1, json=False, trace=None, save=None, every=0, resume=None, fork=1, **options):
        options = Options(model=str(tiny_chat_checkpoint), quiet=True, **options)
        going = Going(save, every, resume, fork)
        code = run_prompt(options, options.params(n=n), prompt, None, lanes=2, json=json, trace=trace, going=going)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_two_runs_print_what_one_prints(generate, tmp_path, capsys):
    """Wherever the first one ends: an emoji, half a stop string and the last newline are the second one's."""
    path, sampled = tmp_path / "a.thought", {"seed": 1, "temperature": 5.0, "stop": ["ab"], **RING}
    _, whole, _ = generate("Hi", max_tokens=60, **sampled)
    texts = set()
    for first in range(20, 40):
        code, begun, err = generate("Hi", max_tokens=first, save=path, **sampled)
        assert (code, err) == (0, "")
        code, rest, err = generate(resume=path, max_tokens=60)
        assert (code, err) == (0, "")
        assert begun + rest == whole
        texts.add(begun)
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(texts) > 5
    assert "\ufffd" in whole or len(whole) > 20
    # What is over stays over: nothing more is printed.
    generate("Hi", max_tokens=30, save=path, **sampled)
    assert generate(resume=path)[:2] == (0, "")
    branches = generate(resume=path, fork=3, max_tokens=60)[1].splitlines()
    assert len({*branches}) >= 3
    assert whole.splitlines()[0] == branches[0]
    assert generate(resume=path, temperature=0.0, max_tokens=60, json=True)[0] == 0
    show_state(path, json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"]["answer"], facts["state"]) == (30, "ended (length)")
    assert facts["file_bytes"] == path.stat().st_size
    show_state(path, json=False)
    assert "30 new" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 5}, "--every: it goes with --save"),
        ({"fork": 2}, "--fork: it goes with --resume"),
        ({"fork": 0}, "--fork = 0: accepted is an int >= 1"),
        ({"every": -1, "save": Path("a")}, "--every = -1: accepted is an int >= 0"),
        ({"save": Path("a"), "n": 2}, "--save: it keeps one text"),
        ({"save": Path("no/a")}, "--save 'no/a': there is no folder 'no'"),
        ({"resume": Path("a"), "n": 2}, "-n 2: accepted with --resume is --fork 2"),
        ({"resume": Path("a"), "trace": Path("t")}, "--trace: it records a text from its prompt on"),
        ({"resume": Path("a"), "prompt": "Hi"}, "PROMPT: accepted with --resume is none"),
        ({"resume": Path("a"), "system": "Hi"}, "--system: accepted with --resume is none"),
        ({"resume": Path("a")}, "snapshot 'a': No such file or directory"),
        ({}, "prompt: give one"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(generate, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RingkvError, match=message):
        generate(**options)


def test_a_ring_of_ones_own_is_named(generate, tmp_path):
    path = tmp_path / "a.thought"
    generate("Hi", max_tokens=30, save=path, seed=1, **RING)
    with pytest.raises(RingkvError, match="budget is 24, and this engine's is 25"):
        generate(resume=path, budget=25, max_tokens=60)
    snapshot = Snapshot.load(path)
    snapshot.about["policy"] = "os:system"
    snapshot.save(path)
    with pytest.raises(
        RingkvError, match="--policy: the snapshot is of 'os:system', which --resume takes by name only"
    ):
        generate(resume=path, max_tokens=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_what_is_there(tiny_chat_checkpoint, tmp_path, generate, number):
    path, options = tmp_path / "a.thought", {"seed": 1, "temperature": 5.0, **RING}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [Path(sys.executable).with_name("ringkv"), "generate", "Hi", "-m", tiny_chat_checkpoint, *arguments]
    command += ["--max-tokens", "1000000", "--save", path, "--every", "50", "--on-repetition", "ignore"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    snapshot = Snapshot.load(path)
    assert snapshot.ended == "cancelled"
    assert len(snapshot.tokens) > 50
    assert sorted(os.listdir(tmp_path)) == ["a.thought"]
    more = len(snapshot.tokens) + 20
    _, rest, _ = generate(resume=path, max_tokens=more)
    _, whole, _ = generate("Hi", max_tokens=more, on_repetition="ignore", **options)
    assert out.decode() + rest == whole


def test_a_folder_that_goes_away_is_said_and_the_text_is_whole(generate, tmp_path, monkeypatch):
    folder, options = tmp_path / "gone", {"seed": 1, **RING}
    folder.mkdir()
    _, whole, _ = generate("Hi", max_tokens=40, **options)
    save = Snapshot.save

    def gone(self, path, field):
        if folder.exists():
            folder.rmdir()
        save(self, path, field)

    monkeypatch.setattr(Snapshot, "save", gone)
    code, out, err = generate("Hi", max_tokens=40, save=folder / "a.thought", every=10, **options)
    assert (code, out) == (1, whole)
    assert err.startswith(f"ringkv: --save = '{folder / 'a.thought'}': there is no folder")
    assert err.count("\n") == 2
