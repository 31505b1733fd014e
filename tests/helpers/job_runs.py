"""Files of prompts for tests: rows, runs, results, and an engine that needs no model."""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringkv import SamplingParams
from ringkv.apps.jobs.job import Job, Status
from ringkv.engine.completion import Completion

Results = Generator[tuple[int, Completion], None, None]

SETTINGS = {"model": "fake", "ring": {"budget": 96, "window": 64}, "lanes": 4}
PARAMS = SamplingParams(seed=3, max_tokens=10)


def fake(
    text: str = "", *, tokens: Sequence[int] = (), sample: int = 0, error: str | None = None, refused: bool = False
) -> Completion:
    return Completion(
        text=text,
        thinking=None,
        token_ids=list(tokens),
        prompt_tokens=0 if refused else 3,
        completion_tokens=len(tokens),
        thinking_tokens=0,
        answer_tokens=len(tokens),
        finish_reason="length" if error is None else "error",
        stop_reason=None,
        repetition=None,
        sampling={},
        logprobs=None,
        warnings=[],
        error=None if error is None else {"type": "RingkvError", "message": error},
        timing={},
        sample=sample,
        model="fake",
        dtype={},
        backend="torch",
        ring={"evictions": 2},
    )


class FakeEngine:
    """Its tokens depend on the prompt, the seed and the sample only; prompts with "bad" in them are refused."""

    def __init__(self, order: int = 0) -> None:
        self.order = random.Random(order)
        self.asked: list[Any] = []
        self.closed = False

    def iterate(self, prompts: Iterable[Any], params: Iterable[SamplingParams]) -> Results:
        prompts, params = list(prompts), list(params)
        units = [
            (index, sample)
            for index, each in enumerate(params)
            for sample in range(1 if "bad" in str(prompts[index]) else each.n)
        ]
        self.order.shuffle(units)
        try:
            for index, sample in units:
                prompt, each = prompts[index], params[index]
                self.asked.append((prompt, each, sample))
                if "bad" in str(prompt):
                    yield index, fake(error="prompt: it is bad", refused=True)
                else:
                    rng = random.Random(ascii((prompt, each.seed, sample)))
                    yield index, fake(f"to {prompt}", tokens=rng.choices(range(99), k=5), sample=sample)
        finally:
            self.closed = True


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(
    source: Path,
    output: Path,
    params: SamplingParams = PARAMS,
    settings: Any = SETTINGS,
    engine: Any = None,
    **options: Any,
) -> Status:
    with Job(source, output, params, settings, **options) as job:
        return job.run((engine or FakeEngine()).iterate)


def lines(output: Path) -> list[dict[str, Any]]:
    data = output.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def tokens(output: Path) -> dict[tuple[str, int], list[int]]:
    found = [((str(line["id"]), line["ringkv"]["sample"]), line["ringkv"]["token_ids"]) for line in lines(output)]
    assert len(dict(found)) == len(found)
    return dict(found)


def tokens_without_errors(output: Path) -> dict[tuple[str, int], list[int]]:
    return {
        (str(line["id"]), line["ringkv"]["sample"]): line["ringkv"]["token_ids"]
        for line in lines(output)
        if line["ringkv"].get("error") is None
    }


ROWS: list[dict[str, Any]] = [{"prompt": f"p{at}", "id": f"row {at}", "params": {"n": 1 + at % 3}} for at in range(6)]


class Stop(Exception):
    pass


def run_until(count: int, source: Path, output: Path, **options: Any) -> None:
    """A run that ends by an exception once so many results are written."""

    def stop(status: Status) -> None:
        if status.done >= count:
            raise Stop

    with Job(source, output, PARAMS, SETTINGS, **options) as job, pytest.raises(Stop):
        job.run(FakeEngine(order=count).iterate, stop)


def at_once(prompts: Iterable[Any], params: Iterable[SamplingParams]) -> Results:
    """An engine with one lane that answers at once, and takes a row after the other."""
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        if "bad" in str(prompt):
            yield index, fake(error="prompt: it is bad", refused=True)
            continue
        for sample in range(each.n):
            yield index, fake(f"to {prompt}", sample=sample)
