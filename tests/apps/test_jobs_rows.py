"""Files of prompts at size: rows are read again, checked and prepared when an engine asks for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import ringkv.apps.jobs.job
import ringkv.apps.jobs.rows
from job_runs import (
    PARAMS,
    ROWS,
    SETTINGS,
    FakeEngine,
    at_once,
    lines,
    run,
    run_until,
    tokens,
    tokens_without_errors,
    write_rows,
)
from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps.jobs.job import Job
from ringkv.apps.jobs.rows import Row
from ringkv.errors import RingkvError


def test_a_row_is_prepared_when_the_engine_asks_for_it(tmp_path, monkeypatch):
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": f"p{at}", "params": {"top_k": 5}} for at in range(50)))
    prepared = []
    sampling = Row.sampling
    monkeypatch.setattr(Row, "sampling", lambda row, *given: prepared.append(row.line) or sampling(row, *given))
    with Job(source, tmp_path / "out.jsonl", PARAMS, SETTINGS) as job:
        assert prepared == []
        ahead = []
        job.run(at_once, lambda status: ahead.append(len(prepared) - status.done))
    assert ahead == [0] * 50
    assert prepared == list(range(1, 51))


def test_an_engine_takes_a_row_when_a_lane_is_free(tmp_path, tiny_checkpoint, monkeypatch):
    """Oracle: the same prompts as a list."""
    rows = [{"prompt": [3, 5, 7 + at], "params": {"max_tokens": 2 + at % 3, "n": 1 + at % 2}} for at in range(20)]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    params = SamplingParams(seed=5, temperature=1.0, ignore_eos=True)
    with Engine.from_pretrained(tiny_checkpoint("llama"), ring=RingConfig(budget=24, window=8), lanes=3) as engine:
        asked, ahead = [], []
        prepare = engine.prompts.prepare
        monkeypatch.setattr(
            engine.prompts, "prepare", lambda prompt, *a, **k: asked.append(prompt) or prepare(prompt, *a, **k)
        )
        with Job(source, output, params, SETTINGS) as job:
            job.run(engine.iterate, lambda status: ahead.append(len(asked)))
            seeds = [job.rows[place].sampling(params, job.seed) for place in range(20)]
        assert ahead[0] <= 4
        assert all(one <= done + 4 for done, one in enumerate(ahead))
        whole = engine.generate([row["prompt"] for row in rows], seeds)
    assert list(tokens(output).values()) != []
    assert sorted(tokens(output).values()) == sorted(each.token_ids for each in whole)


ROW_0 = (
    "670de3d08209a51d94b96273c824c02d"  # half of the SHA-256 of '{"id": "row 0", "params": {"n": 1}, "prompt": "p0"}'
)


@pytest.mark.parametrize("indent", [1, 4, None])
@pytest.mark.parametrize("sort", [False, True])
def test_the_settings_file_is_json_and_has_the_format_it_always_had(tmp_path, indent, sort):
    """Oracle: Python's own JSON, which wrote this file before."""
    rows = [*ROWS, {"id": 'a "\u2028\ud83d', "prompt": "é"}]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    run(source, output)
    path = tmp_path / "out.jsonl.ringkv.json"
    written = path.read_bytes()
    theirs = json.loads(written)
    assert written == json.dumps(theirs, indent=1).encode()
    assert list(theirs) == ["settings", "seed", "rows"]
    assert list(theirs["rows"]) == [row["id"] for row in rows]
    assert theirs["rows"]["row 0"] == ROW_0
    path.write_text(json.dumps(theirs, indent=indent, sort_keys=sort))
    assert run(source, output).done == 13
    assert json.loads(path.read_bytes()) == theirs
    run(write_rows(source, *rows, {"prompt": "more"}), output)
    assert list(json.loads(path.read_bytes())["rows"])[-1] == "8"
    with pytest.raises(RingkvError, match="row '8' is not in the input any more"):
        run(write_rows(source, *rows), output)
    write_rows(source, *rows, {"prompt": "more"})
    whole = path.read_bytes()
    for cut, message in ((-4, "it is not the settings of a run"), (-20, "not JSON"), (9, "not JSON")):
        path.write_bytes(whole[:cut])
        with pytest.raises(RingkvError, match=f"out.jsonl.ringkv.json: {message}"):
            run(source, output)


def test_no_rows(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert run(source, output).wanted == 0
    path = tmp_path / "out.jsonl.ringkv.json"
    assert path.read_bytes() == json.dumps(json.loads(path.read_bytes()), indent=1).encode()
    assert json.loads(path.read_bytes())["rows"] == {}


LONG = [{"prompt": f"p{at} " + "x" * 2000} for at in range(150)]  # more than a reader's buffer holds


def test_a_row_that_changes_while_it_waits_ends_the_run(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *LONG), tmp_path / "out.jsonl"
    before = source.read_bytes()

    def change(status: Any) -> None:
        if status.done == 3:
            source.write_bytes(before.replace(b'"p140 x', b'"p140 y'))

    with Job(source, output, PARAMS, SETTINGS) as job, pytest.raises(RingkvError) as ended:
        job.run(at_once, change)
    assert str(ended.value) == f"{source}: line 141 has changed since this run was begun"
    assert len(lines(output)) == 140
    source.write_bytes(before)
    assert run(source, output).done == 150


def test_a_file_that_is_cut_while_it_is_read_ends_the_run(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *LONG), tmp_path / "out.jsonl"
    with Job(source, output, PARAMS, SETTINGS) as job, pytest.raises(RingkvError, match="has changed since this run"):
        job.run(at_once, lambda status: os.truncate(source, 50) if status.done == 1 else None)
    assert len(lines(output)) == len(tokens(output)) < 150


@pytest.mark.parametrize("name", ["x.ringkv.json", "x.ringkv.tmp", "x.ringkv.json.ringkv.tmp", "x.ringkv.lock"])
@pytest.mark.parametrize("link", [False, True])
def test_an_input_that_a_run_would_write_beside_its_output(tmp_path, name, link):
    source = write_rows(tmp_path / name, *ROWS)
    output = tmp_path / "x"
    if link:
        (tmp_path / "other").symlink_to(source)
        source = tmp_path / "other"
    before = source.read_bytes()
    with pytest.raises(RingkvError) as refused:
        run(source, output, retry_errors=True)
    assert str(refused.value) == f"output = '{output}': a run writes {name} beside it, which is the input"
    assert source.read_bytes() == before
    assert not output.exists()


def test_rows_that_are_refused_come_as_the_engine_comes_to_them(tmp_path):
    rows = [{"prompt": at if at % 3 == 0 else f"p{at}"} for at in range(30)]  # a third has a number as its prompt
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    with Job(source, output, PARAMS, SETTINGS) as job:
        status = job.run(at_once)
    found = {line["id"]: line["ringkv"].get("error") for line in lines(output)}
    assert len(found) == len(lines(output)) == 30
    assert {key for key, error in found.items() if error} == {str(at + 1) for at in range(0, 30, 3)}
    assert (status.done, status.failed) == (30, 10)
    places = [int(line["id"]) for line in lines(output)]
    assert all(abs(place - at) <= 2 for at, place in enumerate(places, 1))


def test_a_file_of_refused_rows_needs_no_engine(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", {"prompt": 1}, {"prompt": "a", "params": {"n": 0}})
    engine = FakeEngine()
    status = run(source, tmp_path / "out.jsonl", engine=engine)
    assert (status.wanted, status.failed, engine.closed) == (2, 2, False)


def test_every_sample_of_a_refused_prompt_has_its_error_after_a_kill_between_them(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", {"prompt": "bad", "params": {"n": 3}}), tmp_path / "out.jsonl"
    run_until(1, source, output)
    assert run(source, output).failed == 3
    assert [line["ringkv"]["error"]["message"] for line in lines(output)] == ["prompt: it is bad"] * 3


def test_the_samples_of_a_refused_prompt_do_not_wait_for_the_end(tmp_path):
    rows = [{"prompt": f"{at % 2 * 'bad'} {at}", "params": {"n": 2}} for at in range(6)]
    run(write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl", engine=SimpleNamespace(iterate=at_once))
    found = [(line["id"], line["ringkv"]["sample"]) for line in lines(tmp_path / "out.jsonl")]
    assert found == [(str(line), sample) for line in range(1, 7) for sample in range(2)]


def test_a_sample_that_no_row_has(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    run(source, output)
    for sample in (1, -1):
        content = json.dumps({"id": "row 0", "ringkv": {"sample": sample}}).encode() + b"\n"
        output.write_bytes(content)
        with pytest.raises(RingkvError, match=f"it holds sample {sample} of row 'row 0', which is not in the input"):
            run(source, output)
        assert output.read_bytes() == content


def test_a_result_of_a_row_that_is_new_is_not_of_the_earlier_run(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS[:2]), tmp_path / "out.jsonl"
    run(source, output)
    output.write_bytes(b'{"id": "row 2", "ringkv": {"sample": 0}}\n')
    with pytest.raises(RingkvError, match="it holds sample 0 of row 'row 2', which is not in the input"):
        run(write_rows(source, *ROWS), output)


def test_ids_of_one_hash_are_told_apart(tmp_path, monkeypatch):
    """Oracle: a run in which no two have one."""
    rows = [*ROWS, {"prompt": "last"}]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl")
    monkeypatch.setattr(ringkv.apps.jobs.rows, "hash", lambda key: -5, raising=False)
    run_until(4, source, output)
    settings = tmp_path / "out.jsonl.ringkv.json"
    theirs = json.loads(settings.read_text())
    theirs["rows"] = dict(reversed(theirs["rows"].items()))  # so that each is looked up
    settings.write_text(json.dumps(theirs, indent=1))
    run(source, output)
    assert tokens(output) == tokens(tmp_path / "whole.jsonl")
    with pytest.raises(RingkvError, match=f"{source}: line 9: id 'row 2' is also that of line 3"):
        run(write_rows(source, *rows, {"prompt": "more"}, {"prompt": "x", "id": "row 2"}), output)
    theirs["rows"]["row 7"] = theirs["rows"].pop("7")
    settings.write_text(json.dumps(theirs, indent=1))
    with pytest.raises(RingkvError, match="row 'row 7' is not in the input any more"):
        run(write_rows(source, *rows), output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_long_stretch_of_refused_rows_is_heard_at_once(tmp_path, monkeypatch, number):
    """Refused rows are passed over until the engine has its next one. Oracle: the same rows in one run."""
    rows = [{"prompt": f"p{at}" if at in (0, 399) else at} for at in range(400)]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl", engine=SimpleNamespace(iterate=at_once))
    check, walked = Row.check_prompt, []

    def signalled(row):
        walked.append(row.line)
        if len(walked) == 100:
            signal.raise_signal(number)
        check(row)

    monkeypatch.setattr(Row, "check_prompt", signalled)
    status = run(source, output, engine=SimpleNamespace(iterate=at_once))
    assert (status.interrupted, len(walked)) == (True, 100)
    assert len(lines(output)) == status.done < 400
    monkeypatch.undo()
    assert run(source, output, engine=SimpleNamespace(iterate=at_once)).done == 400
    assert tokens_without_errors(output) == tokens_without_errors(tmp_path / "whole.jsonl")
    assert len(lines(output)) == 400


@pytest.mark.parametrize("kept", [1 << 24, 100])
def test_a_pipe_is_read_once_and_kept(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(ringkv.apps.jobs.rows, "_SPOOLED", kept)
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run(source, tmp_path / "whole.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(
        [sys.executable, "-c", f"open({str(tmp_path / 'pipe')!r}, 'wb').write({source.read_bytes()!r})"]
    ):
        run(tmp_path / "pipe", tmp_path / "out.jsonl")
    assert tokens(tmp_path / "out.jsonl") == tokens(tmp_path / "whole.jsonl")


def test_more_results_than_are_accepted(tmp_path, monkeypatch):
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": "a", "params": {"n": 1 << 16}} for _ in range(16)))
    monkeypatch.setattr(ringkv.apps.jobs.job, "MOST", 1 << 20)
    with Job(source, tmp_path / "out.jsonl", PARAMS, SETTINGS) as job:
        assert job.missing == 1 << 20
    write_rows(source, {"prompt": "b"}, *({"prompt": "a", "params": {"n": 1 << 16}} for _ in range(16)))
    with pytest.raises(RingkvError, match="it asks for 1048577 results; accepted are 1048576 at most"):
        run(source, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
