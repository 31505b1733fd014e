"""The process of a command: its streams, its signals, one line for an error, and its exit code."""

from __future__ import annotations

import _thread
import codecs
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from ringkv.apps import ending
from ringkv.apps.ending import INTERRUPTED as INTERRUPTED
from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine import Engine

_UNWRITABLE = "ringkv.unwritable"  # the name of an error handler
_SHELLS = "bash, zsh, fish, powershell, pwsh"
_LEAST_WIDTH = 20  # columns of a terminal in which a word of --help fits
_CONTROL = [code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]
_REMOVED, _ESCAPED = dict.fromkeys(_CONTROL), {code: f"\\u{code:04x}" for code in _CONTROL}


class _Stream(io.FileIO):
    """A descriptor of stdout or stderr. Its errors say which it is, and it waits where it must not block."""

    def __init__(self, fd: int, title: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self.title = title

    def write(self, data: Any) -> int:
        """Write what fits, at least a byte."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            error.filename = self.title
            raise


def prepare_streams() -> None:
    """Make the standard streams such that every text can be written, and see to it that tables have a width.

    A pipe or a file gets UTF-8. A terminal gets its own encoding, with ? for what that lacks. Bytes of a file's name
    that the locale could not decode go out as they came in. A closed stream becomes an empty one. What the environment
    says of the terminal's size is dropped where it is absurd.
    """
    codecs.register_error(_UNWRITABLE, _replaced)
    for title, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, title) is None:  # it was closed: nothing comes from there, or goes there
            nothing = os.open(os.devnull, os.O_RDWR)
            setattr(sys, title, open(nothing, mode, closefd=False))  # noqa: SIM115 - open as long as the process
    for title in ("stdout", "stderr"):
        stream = getattr(sys, title)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors=_UNWRITABLE)
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):  # it is not on Windows' console
            stream.flush()
            buffer = io.BufferedWriter(_Stream(stream.fileno(), title))
            wrapped = io.TextIOWrapper(buffer, encoding, _UNWRITABLE, line_buffering=stream.line_buffering)
            setattr(sys, title, wrapped)
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):  # the last one is typer's
        if not re.fullmatch("[0-9]{1,4}", value := os.environ.get(name, "")) or int(value) < _LEAST_WIDTH:
            os.environ.pop(name, None)


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that a stream has no bytes for."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    run = error.object[error.start : error.end]
    with suppress(UnicodeError):
        data = run.encode("ascii", "surrogateescape")
        data.decode("utf-8")
        return data, error.end
    return "?" * len(run), error.end


def visible(text: str, stream: Any) -> str:
    """A text as a stream gets it: a terminal without control characters, a pipe or a file as it is.

    What a model, a checkpoint or a trace says may hold escape sequences, and a terminal obeys them.
    """
    return text.translate(_REMOVED) if stream.isatty() else text


def visible_json(text: str) -> str:
    """JSON of the same value without control characters: they are escaped."""
    return text.translate(_ESCAPED)


def say(text: str) -> None:
    """Write to stdout, at once."""
    sys.stdout.write(visible(text, sys.stdout))
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line to stderr. Where that fails, as on a full disk, the command goes on and its exit code stays."""
    try:
        sys.stderr.write(visible(f"{text}\n", sys.stderr))
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: Any) -> None:
    """Let go what a stream could not write; Python would try again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Commands(typer.core.TyperGroup):
    """The group of all commands. A command that is called wrongly is answered in one line, too."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run one, and exit with its code."""
        standalone, options["standalone_mode"] = options.get("standalone_mode", True), False
        prepare_streams()
        given = args[0] if args else options.get("args") or sys.argv[1:]
        try:
            if not {"--show-completion", "--install-completion"}.isdisjoint(given):
                _check_shell()
            code = super().main(*args, **options)
        except RingkvError as error:
            if "--debug" in given:
                raise
            note(f"ringkv: {error}")
            code = 2
        except SystemExit as error:  # completion's; or what rich makes of a reader that left
            code = 0 if isinstance(error.__context__, BrokenPipeError) else error.code
        except Exception as error:  # typer's and click's share no class, and what is not theirs is raised again
            debug = "--debug" in given
            if isinstance(error, OSError) and not debug:
                told, code = _told(error), 1
            elif standalone and hasattr(error, "format_message"):  # typer's classes, or click's, by its version
                told, code = f"{' '.join(error.format_message().split()).rstrip('.')}; -h lists what is accepted", 2
            else:
                raise
            note(f"ringkv: {told}")
        if standalone:
            sys.exit(code or 0)
        return code


def _check_shell() -> None:
    """Refuse to make completion for a shell that cannot be found: typer asks the parents of the process."""
    import shellingham

    try:
        found = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        found = "no shell"
    if found not in _SHELLS.split(", "):
        raise RingkvError(f"completion is for the shell that runs the command, here {found}: accepted are {_SHELLS}")


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code.

    The code is 2 for bad input, 1 for a failure of the machine or of this program, 130 after an interrupt, and 0 where
    the reader of stdout has left. With ``debug`` an error is shown with its traceback, and log lines are printed.
    """
    if debug:
        _note_all()
    with _losing_no_interrupt(), handling_signals(_interrupt):
        try:
            yield
            sys.stdout.flush()
        except typer.Exit:  # a RuntimeError
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _abandon(sys.stdout)
            raise typer.Exit(0) from None
        except Exception as error:  # one line, whatever went wrong
            if debug:
                raise
            note(f"ringkv: {_told(error)}")
            raise typer.Exit(2 if isinstance(error, RingkvError) else 1) from None


def _note_all() -> None:
    """Print log lines, and the traceback of an error that ends the process."""
    import logging
    import traceback

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(self.format(record))

    logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s", handlers=[Notes()])
    sys.excepthook = lambda *error: note("".join(traceback.format_exception(*error)).rstrip("\n"))


def _told(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.filename == "stdout":
        _abandon(sys.stdout)
        return f"stdout: {error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (RingkvError, MemoryError, OSError, RuntimeError)):
        text = f"{type(error).__name__}: {text}; --debug shows where"
    return text


@contextmanager
def handling_signals(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """While open, Ctrl-C and SIGTERM call this. A signal that is ignored, as shells may ask for, stays ignored.

    See ``ending`` for how long a signal may take. In a thread, which Python lets handle none, nothing happens.
    """
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}

    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt. While a module is imported, which may swallow the exception, end the process at once."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            ending.end()
        frame = frame.f_back
    raise KeyboardInterrupt


@contextmanager
def _losing_no_interrupt() -> Iterator[None]:
    """While open, a KeyboardInterrupt that a finaliser swallows is raised again a moment later, without a traceback."""

    def hook(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            before(lost)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def interrupt_cancels(engine: Engine, *, goes_on: bool = False) -> Iterator[list[int]]:
    """While open, the first Ctrl-C (or SIGTERM) ends the running request and the second one the program.

    Args:
        goes_on: the program goes on after Ctrl-C, and looks for itself at what came before there was a request. Else
            such a signal ends it, as there is nothing to end in order.

    Yields:
        A list that holds the signals that came.
    """
    came: list[int] = []

    def handler(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1 or not (engine.cancel(0) or goes_on):
            raise KeyboardInterrupt
        if goes_on and number == signal.SIGINT:
            ending.forgive()

    ending.spare(goes_on)
    try:
        with handling_signals(handler):
            yield came
    finally:
        ending.spare(False)
