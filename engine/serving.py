"""One loop for all callers: whoever waits for an event steps the engine, for everybody."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial

from ringkv.engine.call import Call
from ringkv.engine.completion import StreamEvent
from ringkv.engine.loop import Loop
from ringkv.errors import RingkvError

ASYNC_QUEUE = 256  # calls of an event loop that may wait in an engine beside those that have a lane
PATIENCE = 0.02  # seconds that a caller waits for another thread's step before it stands in line to step itself


class Serving:
    """The callers of an engine: threads, tasks, and streams that are half read.

    No thread of its own runs for a caller that waits in a thread: the caller takes turns with the loop until its event
    has come, and hands out what came for others. For tasks of an event loop, which must not wait, a thread does so as
    long as one of them is open.

    Args:
        loop: serves calls.
        limits: called with what computes; sets what holds while the engine computes, such as its threads.
    """

    def __init__(self, loop: Loop, limits: Callable[[Callable[[], None]], None]) -> None:
        self.loop: Loop | None = loop
        self._limits = limits
        self._drive = threading.Lock()  # held for a turn, or by a caller that wants to be alone
        self._driver: int | None = None  # the thread that holds it
        self._in_line: Call | None = None  # whose caller waits for it
        self._pump: threading.Thread | None = None
        self._pumping = threading.Lock()  # held while a call comes to the pump, and while the pump decides to end
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._places = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()

    def register(self, call: Call) -> Call:
        """Make a call known, so that it can be cancelled from now on."""
        self.check()
        self._calls[id(call)] = call
        return call

    def cancel(self, index: int) -> bool:
        """End the requests with this index, of every call; returns whether a call is open."""
        # Of a copy, and without a lock: signal handlers come here too.
        calls = [call for reference in self._calls.valuerefs() if (call := reference()) is not None and not call.ended]
        for call in calls:
            call.cancelled.add(index)
        return bool(calls)

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            RingkvError: the engine is closed, lies in another process, or is at work further up in this thread.
        """
        self.check_open()
        self._check_outside()

    def check_open(self) -> None:
        """Refuse a closed engine, and one of another process.

        Raises:
            RingkvError: which of both.
        """
        if os.getpid() != self._process:
            raise RingkvError("engine: it was made before this process was forked; make it in the process that uses it")
        if self.loop is None or self.loop.closing:
            raise RingkvError("engine: it is closed")

    def _check_outside(self) -> None:
        if self._drive.locked() and self._driver == threading.get_ident():
            raise RingkvError(
                "engine: it is at work in this thread, or was lent to it (alone); it cannot be used inside"
            )

    def events(self, call: Call) -> Generator[tuple[int, StreamEvent], None, None]:
        """Serve a call, in the thread that takes its events. Closing it cancels what still runs."""
        came = threading.Event()
        call.notify = came.set
        try:
            with call.open:
                self._submit(call)
                while (event := self._next(call, came)) is not None:
                    yield event
        finally:
            self._tidy()

    async def aevents(self, call: Call) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """Serve a call, to a task, from a thread of the engine's own. Closing it cancels what still runs."""
        tasks, came = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the event loop is closed
                tasks.call_soon_threadsafe(came.set)

        call.notify = notify
        with call.open:
            self._submit_pumped(call)
            while True:
                came.clear()
                ended, error = call.ended, call.error
                while call.ready:
                    yield call.ready.popleft()
                if error is not None:
                    raise error
                if ended:
                    return
                await came.wait()

    def place(self, lanes: int) -> asyncio.Semaphore:
        """What a task of this event loop holds while its call is served or waits; there are ``lanes + ASYNC_QUEUE``."""
        return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(lanes + ASYNC_QUEUE))

    def _submit_pumped(self, call: Call) -> None:
        call.pumped = True
        with self._pumping:
            self._submit(call)
            if self._pump is None or not self._pump.is_alive():
                self._pump = threading.Thread(target=self._keep_turning, name="ringkv", daemon=True)
                self._pump.start()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no request runs: those that did are served to their end first, and those that wait go on waiting."""
        self.check()
        with self._drive:
            loop = self._opened()
            loop.tidy()
            while loop.running:
                self._turn(loop, admit=False)
            self._driver = threading.get_ident()
            try:
                yield
            finally:
                self._driver = None

    def close(self) -> None:
        """Cancel everything, and let go of the loop. What runs in another thread ends within a step of it."""
        if self.loop is None:
            return
        if os.getpid() == self._process:
            self._check_outside()
            self.loop.closing = True
            with self._drive:
                if self.loop is not None:
                    self.loop.close()
        self.loop = None

    def _submit(self, call: Call) -> None:
        self.check()
        self._opened().arrived.append(call)

    def _opened(self) -> Loop:
        if self.loop is None:
            raise RingkvError("engine: it is closed")
        return self.loop

    def _next(self, call: Call, came: threading.Event) -> tuple[int, StreamEvent] | None:
        """The next event of a call; None at its end."""
        while not call.ready:
            if call.error is not None:
                raise call.error
            if call.ended:
                return None
            if self._others_drive(call) and came.wait(PATIENCE):
                came.clear()
                continue
            self._check_outside()
            self._in_line = call
            with self._drive:
                self._in_line = None
                if not (call.ready or call.ended or call.error):
                    self._turn(self._opened())
        return call.ready.popleft()

    def _others_drive(self, call: Call) -> bool:
        waits = self._in_line
        return self._driver is not None or (waits is not None and waits is not call and waits.open.locked())

    def _turn(self, loop: Loop, admit: bool = True) -> None:
        self._driver = threading.get_ident()
        try:
            # What a turn sets for itself, such as the backend, is gone when it ends, however it ends.
            copy_context().run(self._limits, partial(loop.turn, admit))
        finally:
            self._driver = None

    def _tidy(self) -> None:
        """After a call: free its lanes. A thread that is stepping does that itself."""
        if not self._drive.locked():  # this may be the thread that holds it: generators end wherever garbage is found
            with self._drive:
                if self.loop is not None:
                    self.loop.tidy()

    def _keep_turning(self) -> None:
        """Take turns as long as a call is open that waits for them."""
        while True:
            with self._drive:
                with self._pumping:
                    loop = self.loop
                    if loop is not None:
                        loop.tidy()
                    if loop is None or not any(call.pumped for call in loop.calls):
                        self._pump = None
                        return
                with suppress(Exception):  # those whose step it was hear of it in the next turn
                    self._turn(loop)
