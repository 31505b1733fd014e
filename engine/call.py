"""What one caller asks of the engine, and who has a lane."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ringkv.engine.completion import Completion, StreamEvent
from ringkv.engine.record import Recorder
from ringkv.engine.request import Generation, Request
from ringkv.engine.runner import Progress

Wave = list[Request] | Completion  # the samples of one prompt; or what a prompt that is refused comes to


@dataclass(frozen=True)
class Keep:
    """Which snapshots a call wants.

    Attributes:
        last: one with each completion.
        every: one after so many tokens of a request, and after each multiple; 0: none.
    """

    last: bool = False
    every: int = 0


NO_SNAPSHOTS = Keep()


class Call:
    """What one caller asks for, and the events that came of it and were not taken yet.

    It is open while the lock ``open`` is held; what belongs to a call that is not open is dropped before the next
    step. No exception can come between a ``with`` on a lock and its release, wherever an interrupt strikes.

    Args:
        waves: (index, wave) of each prompt, prepared one by one as lanes come free.
        on_prefill: called with (layers done, layers in all) while a prompt is read.
        recorder: observes the ring as long as the call runs.
        keep: which snapshots are handed out.

    Attributes:
        ready: (index, event), the oldest first.
        cancelled: the indices of requests to end; may grow at any time, from any thread.
        ended: nothing more will come.
        error: what ended it before its time.
        notify: called from whichever thread has put something into ``ready``, or has ended the call.
        pumped: nobody who takes its events steps the engine; see ``Serving``.
    """

    def __init__(
        self,
        waves: Iterable[tuple[int, Wave]],
        on_prefill: Progress | None = None,
        recorder: Recorder | None = None,
        keep: Keep = NO_SNAPSHOTS,
    ) -> None:
        self._waves, self.on_prefill, self.recorder, self.keep = iter(waves), on_prefill, recorder, keep
        self.open = threading.Lock()
        self.coming: deque[Request] = deque()
        self.exhausted = self.ended = False
        self.ready: deque[tuple[int, StreamEvent]] = deque()
        self.cancelled: set[int] = set()
        self.error: BaseException | None = None
        self.notify: Callable[[], None] = lambda: None
        self.pumped = False

    def fetch(self) -> bool:
        """Prepare the next prompt, if no request waits; returns whether one waits now, or was answered."""
        if self.coming or self.exhausted:
            return bool(self.coming)
        try:
            index, wave = next(self._waves, (0, None))
        except Exception as error:  # of an iterator of the caller's
            self.fail(error)
            return False
        if wave is None:
            self.exhausted = True
        elif isinstance(wave, Completion):
            self.serve(index, StreamEvent("", completion=wave))
        else:
            self.coming.extend(wave)
        return wave is not None

    def serve(self, index: int, event: StreamEvent) -> None:
        """Hand out an event."""
        self.ready.append((index, event))
        self.notify()

    def fail(self, error: BaseException) -> None:
        """End with an error, which its caller will meet."""
        self.error = error
        self.exhausted = True
        self.coming.clear()
        self.notify()


@dataclass(frozen=True, eq=False)
class Seat:
    """A generation that has a lane, and whose it is."""

    call: Call
    generation: Generation

    def due(self, coming: int = 0) -> bool:
        """Whether a snapshot is wanted once so many more tokens have come, unless one of them is the last."""
        every = self.call.keep.every
        return every > 0 and (len(self.generation.tokens) + coming) % every == 0


@dataclass(frozen=True)
class Step:
    """A launched step whose tokens were not read yet: who ran in it, and the ring's figures after it."""

    seats: dict[int, Seat]
    counts: np.ndarray  # [L, B]
    evicted: np.ndarray
    spans: np.ndarray
