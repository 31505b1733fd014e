"""What the scripts that measure share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ringkv.apps.measure.bench import machine


def note(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def finish(result: dict[str, Any]) -> None:
    """Print the last line of a script: its figures and the machine as JSON."""
    print(json.dumps(result | {"machine": machine()}), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how many seconds the block took."""
    start = time.monotonic()
    yield
    note(f"{what}: {time.monotonic() - start:.0f} s")
