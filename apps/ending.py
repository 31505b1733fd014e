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
UNHEARD = 1.5  # seconds that a signal waits for its handler
HEARD = 5.0  # seconds that the process may then take to end in order
at_end: list[Callable[[], object]] = []  # what is put right before the process is ended at once


class _Signals:
    """How many of those that end a process came, ran their handler, and did not mean the process."""

    came = heard = forgiven = 0
    last = 0.0  # when the last one came or was heard
    spared = False  # Ctrl-C ends something else, whenever its handler can run


_signals = _Signals()


def watch() -> None:
    """Handle Ctrl-C and SIGTERM from now on: at once, until a command handles them, and again after it.

    A thread sees to it that a signal which nobody hears, or which leads to no end, ends the process all the same, and
    that a second one does at once. A signal that is ignored stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: end())
    read, write = socket.socketpair()  # Windows writes to no pipe
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, write), name="signals", daemon=True).start()


def heard() -> None:
    """Told by a handler that runs."""
    _signals.heard += 1
    _signals.last = time.monotonic()


def forgive() -> None:
    """Told by a handler whose signal ends something else than the process."""
    _signals.forgiven += 1


def spare(spared: bool) -> None:
    """Say whether the next Ctrl-C may wait for its handler."""
    _signals.spared = spared


def end() -> None:
    """End the process at once."""
    for put_right in at_end:
        put_right()
    _exit(INTERRUPTED)


def _watch(read: socket.socket, write: socket.socket) -> None:
    spared = False
    while True:
        waiting = _signals.came > _signals.forgiven
        if select.select([read], [], [], 0.1 if waiting else None)[0]:
            for number in read.recv(4096):
                if number in (signal.SIGINT, signal.SIGTERM):
                    _signals.came += 1
                    _signals.last = time.monotonic()
                    spared = _signals.spared and number == signal.SIGINT
        open = _signals.came - _signals.forgiven
        patience = UNHEARD if _signals.came > _signals.heard else HEARD
        if open > 1 or (open == 1 and not spared and time.monotonic() > _signals.last + patience):
            end()
