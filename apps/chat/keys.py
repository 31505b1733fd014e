"""The keys that are typed while an answer comes: held back, for the next prompt to take."""

from __future__ import annotations

import atexit
import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringkv.apps.ending import at_end

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]


@contextmanager
def held_back(fd: int) -> Iterator[None]:
    """While open, a terminal does not show the keys that are typed; they are read with the next line, as by a shell.

    Ctrl-C and the keys that edit a line keep their meaning. A signal that stops or ends the process finds the terminal
    as it was before, and so does an exit of any other kind.

    Args:
        fd: the terminal. Nothing happens if it is none.
    """
    if termios is None or not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    restore = functools.partial(termios.tcsetattr, fd, termios.TCSANOW, before)

    def hold() -> None:
        if os.tcgetpgrp(fd) == os.getpgrp():  # a process in the background would be stopped
            termios.tcsetattr(fd, termios.TCSANOW, silent)

    def step_aside(number: int, frame: Any) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # returns where the process was stopped, and goes on
        signal.signal(number, step_aside)
        hold()

    numbers = [signal.SIGTSTP, signal.SIGQUIT, signal.SIGHUP]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    atexit.register(restore)  # a second Ctrl-C may come in the lines below
    at_end.append(restore)
    try:
        for number in numbers:
            signal.signal(number, step_aside)
        hold()
        yield
    finally:
        restore()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        atexit.unregister(restore)
        at_end.remove(restore)
