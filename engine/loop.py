"""The loop: requests wait in order, lanes step together, a lane that ends is refilled before the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from ringkv.engine.request import Generation, Request
from ringkv.engine.runner import Drawn, Progress, Runner


@dataclass(frozen=True)
class Step:
    """A launched step whose tokens were not read yet: who ran in it, and the ring's figures after it."""

    lanes: dict[int, Generation]
    counts: np.ndarray  # [L, B]
    evicted: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class Served:
    """What a token did to a generation: pieces of text by channel, and the token, if it counts."""

    generation: Generation
    pieces: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Cancelled(Exception):
    """Raised inside a prefill to leave it."""


class Loop:
    """Serves requests with the lanes of a runner.

    The host may read a step's tokens after it has launched the next ones (``runner.latency``). What it decides late
    acts late: the surplus token of a request that has ended is dropped.

    Args:
        runner: prefills and steps.
        start: makes the generation of a request.
        cancelled: indices of requests to end; may grow while the loop runs, from any thread.
        limits: a context for whatever computes.
    """

    def __init__(
        self,
        runner: Runner,
        start: Callable[[Request, int], Generation],
        cancelled: set[int],
        limits: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.runner, self.ring = runner, runner.ring
        self.start, self.cancelled, self.limits = start, cancelled, limits
        self.running: dict[int, Generation] = {}
        self.flying: deque[Step] = deque()

    def run(self, requests: Iterable[Request], on_prefill: Progress | None = None) -> Generator[Served, None, None]:
        """Serve to the end; a generation whose ``finish_reason`` is set has ended."""
        waiting = deque(requests)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.ring.lanes:
                    yield from self._admit(waiting, on_prefill)
                if self._launch() or self.flying:
                    yield from self._collect()
        finally:
            self.ring.stop_all()
            self.runner.drain()

    def _admit(self, waiting: deque[Request], on_prefill: Progress | None) -> Generator[Served, None, None]:
        """Prefill the next request; samples of the same prompt that find a free lane are copies of it."""
        request = waiting.popleft()
        lane = self._free()
        generation = self.start(request, lane)

        def progress(done: int, layers: int) -> None:
            if request.index in self.cancelled:
                raise Cancelled
            if on_prefill is not None:
                on_prefill(done, layers)

        try:
            with self.limits():
                self.ring.reset(lane, request.seed, request.sample, request.pin)
                logits = self.runner.prefill(lane, request.ids, progress)
        except Cancelled:
            generation.cancel()
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            generation.fail(type(error).__name__, " ".join(str(error).split()))
        if generation.finish_reason is not None:
            self.ring.stop(lane)
            yield Served(generation, generation.flush())
            return
        wave = [generation]
        self.running[lane] = generation
        while waiting and waiting[0].ids is request.ids and len(self.running) < self.ring.lanes:
            mate = self.start(waiting.popleft(), self._free())
            self.running[mate.lane] = mate
            self.ring.copy_lane(lane, mate.lane, mate.request.sample)
            wave.append(mate)
        retained = self.ring.counts[:, lane].tolist()
        for each in wave:
            each.retained = retained
            with self.limits():
                self._prepare(each)
                drawn = self.runner.first(each.lane, logits)
            yield self._take(each, drawn, 0, self._step())

    def _prepare(self, generation: Generation) -> None:
        request = generation.request
        values = request.sampling.values
        ending = request.stop_ids if values["min_tokens"] else ()
        self.runner.sampler.set(generation.lane, request.sampling, request.ids, ending)
        self.runner.steering.set(
            generation.lane, request.inside_thought, values["max_thinking_tokens"], request.closing_message
        )

    def _free(self) -> int:
        return next(lane for lane in range(self.ring.lanes) if lane not in self.running)

    def _step(self) -> Step:
        ring = self.ring
        return Step(dict(self.running), ring.counts.copy(), ring.evicted.copy(), ring.spans.copy())

    def _launch(self) -> bool:
        """Launch a step, unless every running lane already has as many tokens on the way as it may still take."""
        for lane, generation in self.running.items():
            coming = sum(step.lanes.get(lane) is generation for step in self.flying)
            if generation.room <= coming:
                self.ring.stop(lane)
        if not self.ring.running:
            return False
        with self.limits():
            self.runner.launch()
        self.flying.append(self._step())
        return True

    def _collect(self) -> Generator[Served, None, None]:
        """Read the tokens of steps until no more than the runner's latency are on the way."""
        allowed = self.runner.latency if self.ring.running else 0
        while len(self.flying) > allowed:
            with self.limits():
                drawn = self.runner.collect()
            step = self.flying.popleft()
            for lane, generation in step.lanes.items():
                if self.running.get(lane) is generation:
                    yield self._take(generation, drawn, lane, step)

    def _take(self, generation: Generation, drawn: Drawn, row: int, step: Step) -> Served:
        """Account for a drawn token; a generation that ends leaves its lane."""
        lane, token = generation.lane, drawn.tokens[row]
        if generation.request.index in self.cancelled:
            generation.cancel()
            served = Served(generation, generation.flush())
        else:
            wanted = generation.request.sampling.values["logprobs"]
            logprob = None if wanted is None else drawn.logprob(row, wanted)
            forced = drawn.forced is not None and drawn.forced[row]
            served = Served(generation, generation.push(token, forced, logprob), [token] if token >= 0 else [])
        if generation.close_thought:
            generation.close_thought = False
            self.runner.steering.close(lane, behind=len(self.flying))
        if generation.finish_reason is not None:
            generation.figures = {
                "kept": int(step.counts[:, lane].max()),
                "evictions": int(step.evicted[:, lane].max()),
                "evictions_per_layer": step.evicted[:, lane].tolist(),
                "peak_slots": int(step.spans[:, lane].max()),
            }
            self.ring.stop(lane)
            del self.running[lane]
        return served


def _out_of_memory(error: BaseException) -> bool:
    """Whether this is memory that ran out: torch says so in a class on CUDA and in words on a CPU."""
    return isinstance(error, MemoryError) or "memory" in str(error).lower()
