"""A signal ends the process within a moment, also while it is in C, where no handler of Python's can run."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from os import _exit

INTERRUPTED = 130  # the exit code after Ctrl-C or SIGTERM
WITHIN = 1.7  # seconds that a process may take to end in order; to be gone takes it a moment more
at_end: list[Callable[[], object]] = []  # what is put right before the process is ended at once


class _Signals:
    """How many of those that end a process came, and did not mean the process."""

    came = forgiven = 0
    spared = False  # Ctrl-C ends something else, whenever its handler can run


_signals = _Signals()


def watch() -> None:
    """Handle Ctrl-C and SIGTERM from now on: at once, until a command handles them, and again after it.

    A thread sees to it that a signal ends the process within two seconds, also one that nobody hears or that leads to
    no end, and that a second one does at once. A signal that is ignored stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: end())
    read, write = socket.socketpair()  # Windows writes to no pipe
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, write), name="signals", daemon=True).start()


def forgive() -> None:
    """Told by a handler whose signal ends something else than the process. The next one may not wait for its own."""
    _signals.forgiven += 1
    _signals.spared = False


def spare(spared: bool) -> None:
    """Say whether the next Ctrl-C may wait for its handler."""
    _signals.spared = spared


def end() -> None:
    """End the process at once."""
    for put_right in at_end:
        put_right()
    _exit(INTERRUPTED)


def _watch(read: socket.socket, write: socket.socket) -> None:
    due = None  # when the process must have ended
    while True:
        left = None if due is None else max(0.0, due - time.monotonic())
        if select.select([read], [], [], left)[0]:
            for number in read.recv(4096):
                if number in (signal.SIGINT, signal.SIGTERM):
                    _signals.came += 1
                    spared = _signals.spared and number == signal.SIGINT
                    due = None if spared else time.monotonic() + WITHIN
        open = _signals.came - _signals.forgiven
        if open > 1 or (open == 1 and due is not None and time.monotonic() >= due):
            end()
        if open == 0:
            due = None
