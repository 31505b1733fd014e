"""Measure what it takes to save, load, fork and resume a text, after few tokens and after many.

    python bench/state.py

SmolLM2-135M under a ring of 512 (budget 448, window 64) writes a text; after 1,000 and after 20,000 tokens
(``--many``) its snapshot is taken, saved, loaded and forked, five times each, and the median is told. A
prompt of 2,000 tokens is then read, and gone on with from its saved state. Goals: sizes and times that are equal within
10%, token ids apart; to save in less than five steps' time; a first token 20 times as soon. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringkv import Engine, RingConfig, SamplingParams, Snapshot
from ringkv.bench.common import finish, note, table

PARAMS = SamplingParams(seed=0, ignore_eos=True, on_repetition="ignore", max_tokens=1 << 20)
TIMES = 5


def median_ms(work: Callable[[], object]) -> float:
    """Milliseconds that it takes, the median of some times."""
    spent = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent)


def first_token_ms(engine: Engine, make: Callable[[], Any]) -> float:
    """Milliseconds from asking to the first event."""

    def ask() -> None:
        events = make()
        next(events)
        events.close()

    return median_ms(ask)


def measured(engine: Engine, snapshot: Snapshot, path: Path) -> dict[str, float]:
    """Figures of one snapshot."""
    figures = {"save_ms": median_ms(lambda: snapshot.save(path)), "load_ms": median_ms(lambda: engine.load(path))}
    figures["fork_us"] = 1e3 * median_ms(lambda: snapshot.fork(1))
    figures["resume_ms"] = first_token_ms(engine, lambda: engine.resume(snapshot))
    return {"tokens": len(snapshot.tokens), "bytes": snapshot.nbytes, "file_bytes": path.stat().st_size, **figures}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=20_000)
    few, many, prompt = 1000, parser.parse_args().many, 2000
    ring = RingConfig(budget=448, window=64)
    with Engine.from_pretrained("smollm2", ring=ring, device="cpu") as engine, tempfile.TemporaryDirectory() as folder:
        path, found, steps, last = Path(folder) / "a.thought", {}, [], time.perf_counter()
        events = engine.stream("Write a long story.", PARAMS, every=few)
        for count, event in enumerate(events, 1):
            steps.append(time.perf_counter() - last)
            if event.snapshot is not None and len(event.snapshot.tokens) in (few, many):
                found[len(event.snapshot.tokens)] = event.snapshot
                note(f"{count} events after {sum(steps):.0f} s")
            if len(found) == 2:
                break
            last = time.perf_counter()
        events.close()
        step = statistics.median(steps) * 1e3
        rows = [measured(engine, found[count], path) for count in (few, many)]
        ids = (engine.encode("The quick brown fox jumps over the lazy dog. ") * prompt)[:prompt]
        engine.read(ids).save(path)
        read = first_token_ms(engine, lambda: engine.stream(ids, PARAMS))
        resumed = first_token_ms(engine, lambda: engine.resume(engine.load(path), PARAMS))
    names = [*rows[0]]
    cells = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    note(table(names, cells))
    note(
        f"median step {step:.2f} ms; first token of {prompt} tokens: read {read:.1f} ms, from the file {resumed:.1f} ms"
    )
    targets = {}
    for name in ("bytes", "save_ms", "load_ms", "fork_us"):
        ratio = rows[1][name] / rows[0][name]
        targets[f"{name}_many_over_few"] = {"value": ratio, "goal": 1.1, "met": ratio <= 1.1}
    targets["save_over_step"] = {"value": rows[0]["save_ms"] / step, "goal": 5, "met": rows[0]["save_ms"] < 5 * step}
    targets["read_over_resumed"] = {"value": read / resumed, "goal": 20, "met": read >= 20 * resumed}
    figures = {"bench": "state", "model": "smollm2", "seed": 0, "step_ms": step, "rows": rows}
    finish({**figures, "read_ms": read, "resumed_ms": resumed, "targets": targets})
    return 0


if __name__ == "__main__":
    sys.exit(main())
