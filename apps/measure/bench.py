"""Measuring: a clock, memory, the steps of a runner, and what ``ringkv bench`` reports with them."""

from __future__ import annotations

import itertools
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ringkv.engine import Engine, ModelConfig, RingConfig, Runner, bytes_read, settle
from ringkv.errors import RingkvError, check_int


@dataclass
class Clock:
    """Times between marks: on a GPU those of its own timeline."""

    device: torch.device

    def __post_init__(self) -> None:
        # Numbers are compact, so that a long run may be timed without being what grows.
        self._marks: Any = [] if self.device.type == "cuda" else array("d")

    def mark(self) -> None:
        """Now, or when the device gets here."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def between(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairs]


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How many seconds an action takes by a clock."""
    start = clock()
    action()
    return clock() - start


def copy_bandwidth(device: torch.device, size: int | None = None, tries: int = 10) -> float:
    """Bytes a second of a copy, those read and those written, the best of some, with torch's threads as they are.

    Args:
        size: bytes that are copied: more than a cache holds.
    """
    size = size or 1 << (30 if device.type == "cuda" else 28)
    source, clock = torch.zeros(size, dtype=torch.uint8, device=device), Clock(device)
    target = torch.empty_like(source)
    for _ in range(tries + 1):  # the first one touches the pages
        clock.mark()
        target.copy_(source)
    clock.mark()
    return 2e3 * size / min(clock.between()[1:])


def reset_peak(device: torch.device) -> None:
    """Start ``peak_bytes`` again from what is held now, where the system allows it: on a GPU, and on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes taken of the GPU's memory, or resident in this process; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux getrusage counts what the parent had when it started this process, and never forgets.
    with suppress(OSError), open("/proc/self/status", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, Any]:
    """The machine that the figures come from."""
    return {"cpu": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def run_steps(runner: Runner, steps: int, clock: Clock | None = None) -> list[list[int]]:
    """Step a runner as an engine does, reading the tokens as late; returns those of each step, by lane.

    Args:
        clock: marks before each step and after the last.
    """
    rows = []
    for step in range(steps):
        if clock is not None:
            clock.mark()
        runner.launch()
        if step >= runner.latency:
            rows.append(runner.collect().tokens)
    if clock is not None:
        clock.mark()
    while len(rows) < steps:
        rows.append(runner.collect().tokens)
    return rows


@dataclass(frozen=True)
class Run:
    """What a run of every lane took.

    Attributes:
        prefill_ms: of reading the prompt and drawing a token, a lane.
        step_ms: of each step, evictions included.
        tokens: what was drawn, [1 + steps] a lane.
    """

    prefill_ms: list[float]
    step_ms: list[float]
    tokens: list[list[int]]


def decode(engine: Engine, prompt: Sequence[int], steps: int) -> Run:
    """Read a prompt into every lane and step them, greedily."""
    clock, first, prefill = Clock(engine.model.device), [], []

    def read(runner: Runner, lane: int) -> None:
        runner.ring.reset(lane, seed=lane)
        first.append(runner.first(lane, runner.prefill(lane, prompt)).tokens[0])

    with engine.alone() as runner:
        for lane in range(engine.lanes):
            prefill.append(1e3 * seconds(partial(read, runner, lane)))
        rows = run_steps(runner, steps, clock)
    tokens = [[token, *(row[lane] for row in rows)] for lane, token in enumerate(first)]
    return Run(prefill, clock.between(), tokens)


@dataclass(frozen=True)
class Bench:
    """What ``ringkv bench`` measures: every ring with every number of lanes, on one decoder.

    Attributes:
        rings: sizes and policies.
        lanes: numbers of lanes.
        prompt, tokens: lengths of the prompt and of what is generated, in each lane.

    Raises:
        RingkvError: a value that is not accepted.
    """

    rings: Sequence[RingConfig]
    lanes: Sequence[int]
    prompt: int = 128
    tokens: int = 96

    def __post_init__(self) -> None:
        for name, values in {"prompt": [self.prompt], "tokens": [self.tokens], "lanes": self.lanes}.items():
            for value in values:
                check_int(name, value, 1)
        for ring in self.rings:
            if ring.capacity < self.prompt + self.tokens and not ring.policy.evicts:
                wanted = f"prompt + tokens = {self.prompt + self.tokens}"
                raise RingkvError(f"policy full holds {ring.capacity} tokens: {wanted}")

    def cards(self, engine: Engine, bandwidth: float) -> list[dict[str, Any]]:
        """What the last step must read at most, and the least time of that: known before anything runs.

        Args:
            bandwidth: bytes a second.

        Raises:
            RingkvError: one that the memory cannot hold.
        """
        model, cards = engine.model, []
        for ring, lanes in itertools.product(self.rings, self.lanes):
            settle(model.config, ring, lanes, model.dtype, model.device, loaded=True)
            entered = self.prompt if self.prompt < ring.capacity else ring.budget_tokens
            slots = min(ring.capacity, entered + self.tokens)
            cards.append(_card(ring, lanes, bytes_read(model, lanes, lanes * model.config.layers * slots), bandwidth))
        return cards

    def rows(self, engine: Engine, bandwidth: float) -> Iterator[tuple[dict[str, Any], Run]]:
        """The figures of each ring and number of lanes, as they are measured.

        Args:
            engine: its decoder is used, its ring is not.
            bandwidth: bytes a second.
        """
        ids = self.ids(engine.model.config)
        options: dict[str, Any] = {"backend": engine.backend, "threads": engine.threads, "name": engine.name}
        for ring, lanes in itertools.product(self.rings, self.lanes):
            with Engine(engine.model, ring=ring, lanes=lanes, **options) as own:
                reset_peak(own.model.device)
                decode(own, ids[:8], 2)  # warms up
                run = decode(own, ids, self.tokens)
                moved = bytes_read(own.model, lanes, int(own.ring.spans.sum()))
                figures = _card(ring, lanes, moved, bandwidth)
                figures |= speeds(run.prefill_ms[0], len(ids) / statistics.median(run.prefill_ms), run.step_ms, lanes)
                figures |= {
                    "achieved_gb_s": moved / figures["late_ms"] / 1e6,
                    "floor_share": figures["floor_ms"] / figures["late_ms"],
                    "evictions": int(own.ring.evicted.max()),
                    "peak_bytes": peak_bytes(own.model.device),
                    "held_bytes": sum(own.plan().values()),
                }
            yield figures, run

    def ids(self, model: ModelConfig) -> list[int]:
        """The prompt: token ids drawn with seed 0."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, model.vocab_size, (self.prompt,), generator=generator).tolist()


def speeds(first_ms: float, prompt_per_ms: float, step_ms: Sequence[float], lanes: int) -> dict[str, float]:
    """How fast a prompt was read and tokens came: early and late are medians of the first and last quarter of steps."""
    part = max(1, len(step_ms) // 4)
    return {
        "prefill_tok_s": 1e3 * prompt_per_ms,
        "first_token_ms": first_ms,
        "early_ms": statistics.median(step_ms[:part]),
        "late_ms": statistics.median(step_ms[-part:]),
        "tok_s": 1e3 * lanes * len(step_ms) / sum(step_ms),
    }


def _card(ring: RingConfig, lanes: int, read: int, bandwidth: float) -> dict[str, Any]:
    which = {"budget": ring.budget, "window": ring.window, "policy": ring.policy.name, "lanes": lanes}
    return which | {"step_bytes": read, "bandwidth_gb_s": bandwidth / 1e9, "floor_ms": 1e3 * read / bandwidth}
