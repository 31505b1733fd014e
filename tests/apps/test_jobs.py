"""Files of prompts (J1-J6): with a fake engine for what may go wrong, with a real one for kill -9."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ringkv.apps.jobs.results
from job_runs import (
    PARAMS,
    ROWS,
    SETTINGS,
    FakeEngine,
    fake,
    lines,
    run,
    run_until,
    tokens,
    tokens_without_errors,
    write_rows,
)
from ringkv import SamplingParams
from ringkv.apps.jobs.job import Job, Status
from ringkv.apps.jobs.rows import DEEPEST, Rows, row_seed
from ringkv.apps.jobs.terminal import summary
from ringkv.engine.seeds import effective_seed
from ringkv.errors import RingkvError


def test_a_result_is_the_carried_fields_the_id_and_a_completion(tmp_path):
    # J3: fields that look like results are carried.
    source = write_rows(
        tmp_path / "in.jsonl",
        {"prompt": "Hi", "text": "mine", "output": [1, {"generation": None}], "tag": "né"},
        {"id": 7, "messages": [{"role": "user", "content": "Hi"}], "params": {"n": 2, "temperature": 0.5}, "x": 1.5},
    )
    engine = FakeEngine()
    status = run(source, tmp_path / "out.jsonl", engine=engine)
    by_unit = {(line["id"], line["ringkv"]["sample"]): line for line in lines(tmp_path / "out.jsonl")}
    assert by_unit.keys() == {("1", 0), (7, 0), (7, 1)}
    assert list(by_unit["1", 0]) == ["text", "output", "tag", "id", "ringkv"]
    assert by_unit["1", 0]["output"] == [1, {"generation": None}]
    assert list(by_unit[7, 1]) == ["x", "id", "ringkv"]
    assert by_unit["1", 0]["ringkv"].keys() == fake().to_dict().keys()
    assert by_unit["1", 0]["ringkv"]["text"] == "to Hi"
    assert '"né"' in (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    asked = {str(prompt): params for prompt, params, _ in engine.asked}
    assert asked["Hi"] == PARAMS.replace(seed=row_seed(3, "1"))
    other = asked[str([{"role": "user", "content": "Hi"}])]
    assert other == PARAMS.replace(seed=row_seed(3, "7"), n=2, temperature=0.5)
    assert status == Status(rows=2, wanted=3, done=3, failed=0, tokens=15, evictions=6)
    assert engine.closed


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"max_tokens": 5}, "max_tokens beside params does nothing: it is carried through"),
        ({"temperature": 0, "tools": []}, "temperature, tools beside params do nothing: they are carried through"),
        ({"maxTokens": 5, "x": 1}, "maxTokens beside params does nothing: it is carried through"),
        ({"max-tokens": 5}, "max-tokens beside params does nothing: it is carried through"),
        ({"samplingParams": {}}, "samplingParams beside params does nothing: it is carried through"),
        ({"system": "Be brief."}, "system beside params does nothing: it is carried through"),
        ({"text": "a", "output": "b", "generation": "c", "answer": "d", "tokens": 3}, None),
        ({}, None),
    ],
)
def test_fields_that_look_like_options_are_named_in_the_result(tmp_path, fields, named):
    """Issue 14, 9: they are carried through (J3), and the result says that they did nothing."""
    rows = [{"prompt": "a", **fields, "params": {"max_tokens": 7, "n": 2}}, {"prompt": "b"}]
    engine = FakeEngine()
    status = run(write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl", engine=engine)
    line = f"{named}; accepted in params are names of SamplingParams"
    warnings = {str(one["id"]): one["ringkv"]["warnings"] for one in lines(tmp_path / "out.jsonl")}
    assert warnings == {"1": [] if named is None else [line], "2": []}
    carried = [one for one in lines(tmp_path / "out.jsonl") if one["id"] == "1"]
    assert all(fields.items() <= one.items() for one in carried)
    assert {params.max_tokens for prompt, params, _ in engine.asked if prompt == "a"} == {7}
    assert (status.warned, status.warning) == ((0, "") if named is None else (2, line))
    assert (f"results with warnings: 2; the first warning: {line}" in summary(status, "out")) == (named is not None)


def test_row_seeds():
    # SHA-256 of "3,a" begins so; the order of rows is no part of it.
    assert row_seed(3, "a") == int.from_bytes(bytes.fromhex("d895a75e6e450d99"), "big")
    assert len({row_seed(seed, key) for seed in (0, 1, 12) for key in ("1", "2", "a", "3,4")}) == 12


def test_a_row_may_set_its_seed(tmp_path):
    rows = [{"prompt": "a", "params": {"seed": 5}}, {"prompt": "b", "params": {"seed": None}}]
    engine = FakeEngine()
    run(write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl", engine=engine)
    assert {prompt: params.seed for prompt, params, _ in engine.asked} == {"a": 5, "b": row_seed(3, "2")}


def test_lines_are_told_apart_by_newlines_alone(tmp_path):
    # J5: BOM, CRLF, blank lines counted, and characters that str.splitlines would break at.
    text = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n  \n{"prompt":\r"c\x85"}\r\n{"id": "x", "prompt": ""}'
    (tmp_path / "in.jsonl").write_bytes(text.encode())
    with closing(Rows(tmp_path / "in.jsonl", lambda row: 1)) as file:
        rows = [file[place] for place in range(len(file))]
    assert [(row.line, row.id, row.prompt) for row in rows] == [(1, "1", "a\u2028b"), (4, "4", "c\x85"), (5, "x", "")]


@pytest.mark.parametrize(
    "line,message",
    [
        (b'{"prompt": "caf\xe9"}', "byte 16 is not UTF-8"),
        (b'{"prompt": "a"', "not JSON: "),
        (b'{"prompt": NaN}', "not JSON: NaN is not finite"),
        (b'{"prompt": "a", "x": 1e999}', "not JSON: 1e999 is not finite"),
        (b'["prompt"]', "accepted is a JSON object; this is a list"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"promt": "a"}', "a row has either prompt or messages; this one has promt"),
        (b"{}", "this one has nothing"),
        (b'{"prompt": "a", "messages": []}', "this one has prompt, messages"),
        (b'{"prompt": "a", "ringkv": {}}', "ringkv is the name of results"),
        (b'{"prompt": "a", "id": 1.5}', "id = 1.5: accepted is a string or a whole number"),
        (b'{"prompt": "a", "id": null}', "id = None"),
        (b'{"prompt": "a", "id": true}', "id = True"),
        (b'{"prompt": "a", "id": "one"}', "id 'one' is also that of line 1"),
        (b'{"prompt": "a", "id": 2}', "id 2 is also that of line 2"),
    ],
)
def test_refuses_what_is_no_row_by_line(tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a", "id": "one"}\n{"prompt": "b"}\n\n' + line + b'\n{"prompt": "c"}\n')
    with pytest.raises(RingkvError) as refused:
        Job(source, tmp_path / "out.jsonl", PARAMS, SETTINGS)
    assert str(refused.value).startswith(f"{source}: line 4: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_refuses_an_input_that_is_not_there(tmp_path):
    with pytest.raises(RingkvError, match=r"input = '.*in.jsonl': No such file"):
        Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", PARAMS, SETTINGS)


BAD_ROWS = (
    {"prompt": "a"},
    {"prompt": "bad", "params": {"n": 2}, "note": 1},
    {"prompt": "b", "params": {"temperatur": 1}},
    {"prompt": "c", "params": {"top_p": 7}},
    {"prompt": 5},
    {"prompt": "d", "params": ["n"]},
    {"messages": "hello"},
)


def test_failed_rows_get_a_record_and_the_others_run(tmp_path):
    # J2
    status = run(write_rows(tmp_path / "in.jsonl", *BAD_ROWS), tmp_path / "out.jsonl")
    found = {(line["id"], line["ringkv"]["sample"]): line["ringkv"] for line in lines(tmp_path / "out.jsonl")}
    assert len(found) == len(lines(tmp_path / "out.jsonl"))
    errors = {unit: result["error"]["message"] for unit, result in found.items() if result.get("error")}
    assert errors == {
        ("2", 0): "prompt: it is bad",
        ("2", 1): "prompt: it is bad",
        ("3", 0): "line 3: params: temperatur is not known; accepted is temperature",
        ("4", 0): "line 4: top_p = 7: accepted is a number from 0 to 1",
        ("5", 0): "line 5: prompt = 5: accepted is a text or a list of token ids",
        ("6", 0): "line 6: params = ['n']: accepted is an object with names of SamplingParams",
        ("7", 0): "line 7: messages = 'hello': accepted is a list of messages",
    }
    assert all(found[unit].keys() == {"sample", "error"} for unit in errors)
    assert found["1", 0]["text"] == "to a"
    assert [line["note"] for line in lines(tmp_path / "out.jsonl") if line["id"] == "2"] == [1, 1]
    assert (status.rows, status.wanted, status.done, status.failed) == (7, 8, 8, 7)


def test_retry_errors_runs_failed_rows_again_and_no_others(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "params": {"n": 2}}, {"prompt": "c"})
    output = tmp_path / "out.jsonl"

    class Failing(FakeEngine):
        def iterate(self, prompts, params):
            prompts = list(prompts)
            for index, done in super().iterate(prompts, params):
                failed = prompts[index] == "c" or (prompts[index] == "b" and done.sample == 1)
                yield index, fake(sample=done.sample, error="NaN") if failed else done

    assert run(source, output, engine=Failing()).failed == 2
    before = output.read_bytes()
    engine = FakeEngine()
    assert run(source, output, engine=engine).failed == 2
    assert engine.asked == []
    assert output.read_bytes() == before
    status = run(source, output, engine=engine, retry_errors=True)
    assert (status.done, status.failed) == (4, 0)
    assert {prompt for prompt, _, _ in engine.asked} == {"b", "c"}
    whole = tmp_path / "whole.jsonl"
    run(source, whole)
    assert tokens(output) == tokens(whole)
    assert sorted(os.listdir(tmp_path)) == [
        "in.jsonl", "out.jsonl", "out.jsonl.ringkv.json", "whole.jsonl", "whole.jsonl.ringkv.json",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["to a file", "to a link", "to nothing yet"])
def test_an_output_that_is_a_link_stays_one(tmp_path, kind):
    """Oracle: the same run without links."""
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "bad"}, {"prompt": "a"})
    (tmp_path / "elsewhere").mkdir()
    target, output = tmp_path / "elsewhere" / "results", tmp_path / "out.jsonl"
    if kind == "to a link":
        (tmp_path / "between").symlink_to("elsewhere/results")
    output.symlink_to("between" if kind == "to a link" else target)
    if kind == "to a file":
        target.touch(mode=0o600)
    assert run(source, output).failed == 1
    before = target.stat()
    assert run(source, output, retry_errors=True).failed == 1
    assert output.is_symlink()
    assert target.stat().st_ino != before.st_ino, "the failed row was taken out"
    assert target.stat().st_mode == before.st_mode
    run(source, tmp_path / "plain.jsonl")
    assert tokens_without_errors(output) == tokens_without_errors(tmp_path / "plain.jsonl")
    assert os.listdir(tmp_path / "elsewhere") == ["results"]
    with Job(source, output, PARAMS, SETTINGS), pytest.raises(RingkvError, match="another run writes it"):
        Job(source, target, PARAMS, SETTINGS)


def nested(depth: int, kind: str) -> Any:
    """Lists or objects within each other, so many."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value] if kind == "list" else {"a": value}
    return value


@pytest.mark.parametrize("kind", ["list", "object"])
def test_a_row_that_is_nested_as_deep_as_is_accepted_is_resumed(tmp_path, kind):
    """Oracle: Python's own JSON, read with a limit that nothing here comes near."""
    rows = [{"prompt": "a", "x": nested(DEEPEST - 1, kind)}, {"prompt": "bad", "x": nested(DEEPEST - 1, kind)}]
    source, output = write_rows(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    run_until(1, source, output)

    def deep(frames: int, **options: Any) -> Status:
        return run(source, output, **options) if not frames else deep(frames - 1, **options)

    assert deep(400).done == 2
    assert deep(400, retry_errors=True).done == 2
    assert [line["x"] for line in lines(output)] == [rows[0]["x"]] * 2
    write_rows(source, {"prompt": "a"}, {"prompt": "b", "x": nested(DEEPEST, kind)})
    with pytest.raises(RingkvError, match=f"line 2: nested too deep; accepted are {DEEPEST} objects and lists"):
        run(source, tmp_path / "other.jsonl")


def test_a_sample_without_a_result_is_an_error_and_a_cancelled_one_is_missing(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})

    class Losing(FakeEngine):
        def iterate(self, prompts, params):
            prompts = list(prompts)
            for index, done in super().iterate(prompts, params):
                if prompts[index] == "a":
                    yield index, dataclasses.replace(done, finish_reason="cancelled")

    with Job(source, tmp_path / "out.jsonl", PARAMS, SETTINGS) as job:
        status = job.run(Losing().iterate)
        assert job.missing == 1
    assert status.failed == 1
    assert [line["ringkv"]["error"]["type"] for line in lines(tmp_path / "out.jsonl")] == ["NoResult"]


def test_three_equal_rows_give_three_results(tmp_path):
    # J1
    source = write_rows(tmp_path / "in.jsonl", *[{"prompt": "same"}] * 3)
    run_until(1, source, tmp_path / "out.jsonl")
    assert len(lines(tmp_path / "out.jsonl")) == 1
    run(source, tmp_path / "out.jsonl")
    found = tokens(tmp_path / "out.jsonl")
    assert found.keys() == {("1", 0), ("2", 0), ("3", 0)}
    assert len({tuple(ids) for ids in found.values()}) == 3


@pytest.mark.parametrize("count", range(1, 12))
def test_resumes_by_row_and_sample_whatever_the_order(tmp_path, count):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run(source, tmp_path / "whole.jsonl")
    run_until(count, source, tmp_path / "out.jsonl")
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert len(lines(tmp_path / "out.jsonl")) == count
    with Job(source, tmp_path / "out.jsonl", PARAMS, SETTINGS) as job:
        before = job.status
        assert job.missing == 12 - count
        status = job.run(FakeEngine(order=99).iterate)
    assert (before.done, before.wanted, status.done) == (count, 12, 12)
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    assert tokens(tmp_path / "out.jsonl") == tokens(tmp_path / "whole.jsonl")


def test_a_finished_run_asks_the_engine_for_nothing(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run(source, tmp_path / "out.jsonl")
    engine = FakeEngine()
    assert run(source, tmp_path / "out.jsonl", engine=engine) == Status(rows=6, wanted=12, done=12, failed=0)
    assert engine.asked == []
    assert not engine.closed  # it was never begun


def test_the_last_line_cut_at_every_byte(tmp_path, monkeypatch):
    # J1
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # seven hundred runs
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "a", "t": "é"}, {"prompt": "b"})
    output = tmp_path / "out.jsonl"
    run(source, output)
    whole, expected = output.read_bytes(), tokens(output)
    start = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        output.write_bytes(whole[:cut])
        engine = FakeEngine()
        run(source, output, engine=engine)
        assert tokens(output) == expected
        kept = (cut >= start - 1) + (cut >= len(whole) - 1)  # a line that lacks its newline only is whole
        assert len(engine.asked) == 2 - kept
        assert output.read_bytes().startswith(whole[: start if kept else 0])


def test_draws_a_seed_once_and_keeps_it(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    seeds = []
    for name in ("a", "b"):
        with Job(source, tmp_path / name, SamplingParams(), SETTINGS) as job:
            seeds.append(job.seed)
            job.run(FakeEngine().iterate)
        with Job(source, tmp_path / name, SamplingParams(), SETTINGS) as job:
            assert job.seed == seeds[-1]
    assert seeds[0] != seeds[1]
    assert json.loads((tmp_path / "a.ringkv.json").read_text())["seed"] == seeds[0]
    with Job(source, tmp_path / "c", SamplingParams(temperature=0), SETTINGS) as job:
        assert job.seed == 0  # greedy is repeatable
    with Job(source, tmp_path / "d", SamplingParams(seed=-1), SETTINGS) as job:
        assert job.seed == 2**64 - 1


@pytest.mark.parametrize(
    "params,settings,difference",
    [
        ({}, {"lanes": 8}, "lanes was 4, now it is 8"),
        ({}, {"ring": {"budget": 96, "window": 32}, "lanes": 8}, "ring.window was 64, now it is 32"),
        ({}, {"model": None}, 'model was "fake", now it is null'),
        ({}, {"policy": "h2o"}, 'policy was absent, now it is "h2o"'),
        ({"temperature": 0.7}, {}, "sampling.temperature was null, now it is 0.7"),
        ({"stop": ["x"], "max_tokens": 11}, {}, "sampling.max_tokens was 10, now it is 11"),
        ({"logit_bias": {5: 1.0}}, {}, 'sampling.logit_bias was null, now it is {"5": 1.0}'),
        ({"seed": 4}, {}, "seed was 3, now it is 4"),
    ],
)
def test_refuses_other_settings_naming_the_first(tmp_path, params, settings, difference):
    # J4
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run_until(3, source, tmp_path / "out.jsonl")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RingkvError) as refused:
        run(source, tmp_path / "out.jsonl", PARAMS.replace(**params), {**SETTINGS, **settings})
    assert str(refused.value).startswith(f"output = '{tmp_path / 'out.jsonl'}': {difference}: ")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run(source, tmp_path / "out.jsonl")  # and the lock is gone


def test_a_setting_that_is_gone_is_another_one(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run(source, tmp_path / "out.jsonl")
    with pytest.raises(RingkvError, match="lanes was 4, now it is absent"):
        run(source, tmp_path / "out.jsonl", settings={"model": "fake", "ring": SETTINGS["ring"]})


def test_settings_survive_json(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    params = PARAMS.replace(stop=("a", "b"), stop_token_ids=[1], logit_bias={3: 1}, temperature=1)
    run(source, tmp_path / "out.jsonl", params, {"lanes": 4.0})
    before = (tmp_path / "out.jsonl").read_bytes()
    run(source, tmp_path / "out.jsonl", params.replace(temperature=1.0), {"lanes": 4})
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_rows_may_be_added_not_changed_or_taken_away(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run(write_rows(source, *ROWS[:3]), output)
    before = tokens(output)
    run(write_rows(source, *ROWS[:3], {"prompt": "new"}), output)
    assert tokens(output).items() >= before.items()
    assert len(tokens(output)) == len(before) + 1
    # The new row belongs to the run from now on.
    with pytest.raises(RingkvError, match="row '4' is not in the input any more"):
        run(write_rows(source, *ROWS[:3]), output)
    with pytest.raises(RingkvError, match="row 'row 1' has changed"):
        run(write_rows(source, ROWS[0], {**ROWS[1], "prompt": "other"}, ROWS[2], {"prompt": "new"}), output)
    reordered: list[dict[str, Any]] = [*ROWS[:3], {"prompt": "new"}]
    run(write_rows(source, *(dict(reversed(row.items())) for row in reordered)), output)


@pytest.mark.parametrize(
    "content,message",
    [
        (b"my notes\n", "line 1 is no result of ringkv"),
        (b'{"id": "row 0", "ringkv": {"sample": 0}}\n{"a": 1}\n', "line 2 is no result of ringkv"),
        (b'{"id": "row 0", "ringkv": {"sample": 0}}\n' * 2, "line 2: sample 0 of row 'row 0' is there twice"),
        (b'{"id": "other", "ringkv": {"sample": 0}}\n', "it holds sample 0 of row 'other', which is not in the input"),
    ],
)
def test_refuses_an_output_that_holds_something_else(tmp_path, content, message):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    run(source, tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(RingkvError, match=message):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_refuses_an_output_without_settings_and_settings_that_are_none(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    output, settings = tmp_path / "out.jsonl", tmp_path / "out.jsonl.ringkv.json"
    for content in (b"my notes", b'{"id": "row 0", "ringkv": {"sample": 0}}\n'):
        output.write_bytes(content)
        with pytest.raises(RingkvError, match=r"it is not empty, and out.jsonl.ringkv.json is not beside it"):
            run(source, output)
        assert output.read_bytes() == content
    for broken in ("", "{}", '{"settings": {}, "seed": "1", "rows": {}}', "[1]"):
        settings.write_text(broken)
        with pytest.raises(RingkvError, match=r"out.jsonl.ringkv.json: "):
            run(source, output)
        assert output.read_bytes() == content


def test_an_empty_output_is_a_fresh_run(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    run(source, output)
    output.write_bytes(b"")
    run(source, output, PARAMS.replace(seed=4), {"other": "settings"})
    assert len(tokens(output)) == 12


def test_one_run_at_a_time(tmp_path, monkeypatch):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    for _ in ("flock", "a file"):
        with Job(source, output, PARAMS, SETTINGS) as job:
            with pytest.raises(RingkvError, match=r"output = '.*out.jsonl': another run writes it"):
                Job(source, output, PARAMS, SETTINGS)
            job.run(FakeEngine().iterate)
        run(source, output)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.ringkv.json"]
        monkeypatch.setattr(ringkv.apps.jobs.results, "fcntl", None)


def test_the_file_that_a_retry_puts_in_place_is_locked_too(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", {"prompt": "bad"}, {"prompt": "a"}), tmp_path / "out.jsonl"
    run(source, output)
    with Job(source, output, PARAMS, SETTINGS, retry_errors=True) as job:
        assert job.missing == 1
        with pytest.raises(RingkvError, match="another run writes it"):
            Job(source, output, PARAMS, SETTINGS)
        job.run(FakeEngine().iterate)
    assert len(lines(output)) == 2


def test_a_retry_without_flock(tmp_path, monkeypatch):
    monkeypatch.setattr(ringkv.apps.jobs.results, "fcntl", None)
    source, output = write_rows(tmp_path / "in.jsonl", {"prompt": "bad"}, {"prompt": "a"}), tmp_path / "out.jsonl"
    run(source, output)
    assert run(source, output, retry_errors=True).done == 2
    assert len(lines(output)) == 2
    (tmp_path / "out.jsonl.ringkv.lock").touch()
    with pytest.raises(RingkvError, match=r"another run writes it; if none does, delete .*out.jsonl.ringkv.lock"):
        run(source, output)


def test_every_line_is_synced_before_the_next(tmp_path, monkeypatch):
    calls: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return noting

    monkeypatch.setattr(os, "write", noted("write", os.write))
    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    with Job(write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl", PARAMS, SETTINGS) as job:
        calls.clear()
        job.run(FakeEngine().iterate, lambda _: calls.append("told"))
    assert calls == ["write", "sync", "told"] * 12


def test_a_write_in_parts_is_one_line(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    run(write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl")
    assert len(tokens(tmp_path / "out.jsonl")) == 12


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_ends_the_run_with_one_line_and_loses_nothing(tmp_path, monkeypatch, failing):
    # J6
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl")
    real = getattr(os, failing)
    written: list[int] = []

    def full(fd: int, *data: Any) -> Any:
        if os.path.samestat(os.fstat(fd), output.stat()):
            if len(written) == 4:
                if data:
                    real(fd, data[0][: len(data[0]) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(1)
        return real(fd, *data)

    engine, iterators = FakeEngine(), []

    def iterate(*arguments: Any) -> Any:
        iterators.append(engine.iterate(*arguments))  # so that only close() ends it
        return iterators[-1]

    with Job(source, output, PARAMS, SETTINGS) as job:
        monkeypatch.setattr(os, failing, full)
        status = job.run(iterate)
        monkeypatch.undo()
    assert status.problem == (
        "output: No space left on device: 4 results are kept, and the same command goes on from there"
    )
    assert engine.closed
    assert (status.done, len(lines(output))) == (4, 4)
    assert run(source, output).problem is None
    assert tokens(output) == tokens(tmp_path / "whole.jsonl")


def test_a_disk_that_is_full_when_errors_are_taken_out_loses_nothing(tmp_path, monkeypatch):
    source, output = write_rows(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "bad"}), tmp_path / "out.jsonl"
    run(source, output)
    before = output.read_bytes()

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RingkvError, match="No space left on device"):
        Job(source, output, PARAMS, SETTINGS, retry_errors=True)
    monkeypatch.undo()
    assert output.read_bytes() == before
    assert run(source, output, retry_errors=True).done == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.ringkv.json"]


def test_a_disk_that_is_full_after_errors_were_taken_out(tmp_path, monkeypatch):
    source, output = write_rows(tmp_path / "in.jsonl", {"prompt": "bad"}, *ROWS), tmp_path / "out.jsonl"
    run(source, output)
    before = tokens_without_errors(output)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Job(source, output, PARAMS, SETTINGS, retry_errors=True) as job:
        monkeypatch.setattr(os, "fsync", full)
        assert job.run(FakeEngine().iterate).problem is not None
    assert tokens(output) == before


def test_a_file_that_is_replaced_while_it_is_locked_is_opened_again(tmp_path, monkeypatch):
    # Between the opening and the lock another run puts its file in place and ends.
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    run(source, output)
    flock = fcntl.flock
    shutil.copy(output, tmp_path / "new")
    torn = output.read_bytes()[:-5]
    output.write_bytes(torn)
    (tmp_path / "old").hardlink_to(output)

    def late(fd: int, operation: int) -> None:
        if (tmp_path / "new").exists():
            os.replace(tmp_path / "new", output)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert run(source, output).done == 12
    assert (tmp_path / "old").read_bytes() == torn
    assert len(tokens(output)) == 12
    with Job(source, output, PARAMS, SETTINGS), output.open() as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_refuses_outputs_that_cannot_be(tmp_path):
    # J6
    source = write_rows(tmp_path / "in.jsonl", *ROWS)
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path / "no" / "out.jsonl": f"there is no folder '{tmp_path / 'no'}'",
        tmp_path: "Is a directory",
        source: "it is the input",
        tmp_path / "." / "in.jsonl": "it is the input",
        tmp_path / "link": "it is the input",
        tmp_path / "pipe": "accepted is a regular file, or - for stdout",
        source / "out.jsonl": "Not a directory",
    }
    for output, message in cases.items():
        with pytest.raises(RingkvError) as refused:
            run(source, output)
        assert message in str(refused.value)
        assert str(refused.value).startswith("output = '")
        assert "\n" not in str(refused.value)
    assert source.read_bytes() == before
    with pytest.raises(RingkvError, match="it is the input"):
        run(tmp_path / "missing", tmp_path / "missing")


def test_an_engine_that_breaks_leaves_whole_lines(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"

    def breaking(prompts, params):
        for place, done in enumerate(FakeEngine().iterate(prompts, params)):
            if place == 5:
                raise RuntimeError("CUDA error")
            yield done

    with Job(source, output, PARAMS, SETTINGS) as job, pytest.raises(RuntimeError, match="CUDA error"):
        job.run(breaking)
    assert len(lines(output)) == 5
    assert run(source, output).done == 12


PIPED = """
import sys
sys.path.insert(0, {helpers!r})
from job_runs import FakeEngine, PARAMS, SETTINGS
from ringkv.apps.jobs.job import Job
with Job("-", {output!r}, PARAMS, SETTINGS) as job:
    job.run(FakeEngine().iterate)
"""


@pytest.mark.parametrize("output", ["-", "out.jsonl"])
def test_stdin_and_stdout(tmp_path, output):
    source = write_rows(tmp_path / "in.jsonl", *ROWS, {"prompt": "half \ud83d a pair", "note": "\ud83d"})
    run(source, tmp_path / "whole.jsonl")
    script = PIPED.format(helpers=str(Path(__file__).parents[1] / "helpers"), output=output)
    done = subprocess.run(
        [sys.executable, "-c", script], input=source.read_bytes(), capture_output=True, check=True, cwd=tmp_path
    )
    if output == "-":
        (tmp_path / "out.jsonl").write_bytes(done.stdout)
        assert not (tmp_path / "-").exists()
    assert tokens(tmp_path / "out.jsonl") == tokens(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_it_resumes(tmp_path, number):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    run(source, tmp_path / "whole.jsonl")
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def stop(status: Status) -> None:
        if status.done == 4:
            signal.raise_signal(number)

    engine = FakeEngine()
    with Job(source, output, PARAMS, SETTINGS) as job:
        status = job.run(engine.iterate, stop)
    assert (status.interrupted, status.done, len(lines(output))) == (True, 4, 4)
    assert engine.closed
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not run(source, output).interrupted
    assert tokens(output) == tokens(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_a_line_waits_for_its_end(tmp_path, monkeypatch, number):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    write = os.write

    def interrupted(fd: int, data: Any) -> int:
        if output.read_bytes().count(b"\n") < 2 or len(data) < 20:
            return write(fd, data)
        count = write(fd, data[:-10])
        signal.raise_signal(number)
        return count

    with Job(source, output, PARAMS, SETTINGS) as job:
        monkeypatch.setattr(os, "write", interrupted)
        status = job.run(FakeEngine().iterate)
    assert status.interrupted
    assert len(lines(output)) == 3


def test_runs_in_a_thread_without_signals(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    found: list[Status] = []
    thread = threading.Thread(target=lambda: found.append(run(source, output)))
    thread.start()
    thread.join()
    assert found[0].done == 12


def test_an_ignored_signal_stays_ignored(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", *ROWS), tmp_path / "out.jsonl"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Job(source, output, PARAMS, SETTINGS) as job:
            status = job.run(FakeEngine().iterate, lambda _: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (status.interrupted, status.done) == (False, 12)


def save_tokenizer(tmp_path: Path, size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the quick brown fox and the lazy dog " * 3],
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))


def moments() -> list[dict[str, int]]:
    """Thirty of them: before, within and after a line, and at any byte."""
    rng = random.Random(0)
    by_line = [{"line": rng.randrange(4), "keep": keep} for keep in [0, 1, -1, -2, 100, 10**9] for _ in range(3)]
    by_byte = [{"bytes": rng.randrange(6000)} for _ in range(12)]
    return rng.sample(by_line + by_byte, 30)


def test_killed_thirty_times(tmp_path, tiny_checkpoint):
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("qwen3", vocab_size=300), model)
    save_tokenizer(model, 300)
    rng = random.Random(1)
    rows = [
        {
            "prompt": "".join(rng.choices("the quick fox", k=rng.randrange(5, 90))),
            "params": {"max_tokens": rng.randrange(4, 50)},
        }
        for _ in range(40)
    ]
    source = write_rows(tmp_path / "in.jsonl", *rows)
    script = Path(__file__).parents[1] / "helpers" / "kill_runs.py"
    output, unbroken = tmp_path / "out.jsonl", tmp_path / "unbroken.jsonl"
    arguments = [str(each) for each in (script, model, source, output, unbroken, json.dumps(moments()))]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    exits = [status for status, _ in json.loads(done.stdout)]
    assert exits == [0] + [-signal.SIGKILL] * 30 + [0]
    assert len(lines(output)) == 80
    found = tokens(output)
    assert found.keys() == {(str(line), sample) for line in range(1, 41) for sample in range(2)}
    assert found == tokens(unbroken)
    assert all(line["ringkv"]["error"] is None for line in lines(output))
    assert sum(line["ringkv"]["ring"]["evictions"] for line in lines(output)) > 80


@pytest.mark.parametrize(
    "temperature, file, seed",
    [
        *((0, {}, 0), (1e-6, {}, 0), (1e-5, {}, None), (None, {}, None)),
        *((None, {"do_sample": False}, 0), (0.5, {"do_sample": False}, None), (None, {"temperature": 0.0}, 0)),
    ],
)
def test_a_greedy_run_without_a_seed_has_the_seed_of_a_greedy_request(tmp_path, temperature, file, seed):
    """Oracle: ``effective_seed`` of an engine without a seed: 0 where it is greedy, else drawn."""
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "Hi"})
    seeds = []
    for name in ("a", "b"):
        params = SamplingParams(temperature=temperature)
        run(source, tmp_path / f"{name}.jsonl", params, generation_config=lambda: file)
        run(source, tmp_path / f"{name}.jsonl", params, generation_config=None)  # nobody asks where it goes on
        seeds.append(json.loads((tmp_path / f"{name}.jsonl.ringkv.json").read_text())["seed"])
    if seed is None:
        assert seeds[0] != seeds[1]
    else:
        assert seeds == [effective_seed(None, None, 0, greedy=True)] * 2 == [seed] * 2
