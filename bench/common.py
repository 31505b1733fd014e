"""What the scripts that measure share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ringkv.apps.measure.bench import machine


def note(text: str) -> None:
    """A line for whoever waits."""
    print(text, flush=True)


def finish(result: dict[str, Any]) -> None:
    """The last line of a script: one line of JSON, with what it ran on."""
    print(json.dumps(result | {"machine": machine()}), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long something took."""
    start = time.monotonic()
    yield
    note(f"{what}: {time.monotonic() - start:.0f} s")
