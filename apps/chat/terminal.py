"""The chat as a person sees it: the prompt, the answer as it comes, the line below it. Plain text where it is piped."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from ringkv.apps.chat.commands import handle
from ringkv.apps.chat.keys import held_back
from ringkv.apps.chat.session import ChatSession, Events
from ringkv.apps.console import print_stats, summary
from ringkv.apps.options import argument_text
from ringkv.apps.process import note, say, visible
from ringkv.engine import THINKING, Completion
from ringkv.errors import RingkvError
from ringkv.files import utf8_text

_BLOCK = '"""'
_NOTICEABLE = 0.5  # seconds of reading a prompt before progress is shown
_ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def read_message(ask: Callable[[str], str]) -> str:
    """One message, of one line or several; a block never is a command.

    Args:
        ask: prints a prompt and returns the line that follows it; EOFError at the end, which also ends a message.
    """
    line = ask("> ")
    if line.lstrip().startswith(_BLOCK):
        lines = [line.lstrip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            try:
                lines.append(ask("... "))
            except EOFError:
                lines.append(_BLOCK)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return " " + "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n"
        with suppress(EOFError):
            line += ask("... ")
    return line


def status(done: Completion, unfinished: bool, blocks: str) -> str:
    """The line below an answer.

    Args:
        unfinished: whether /continue goes on with it.
        blocks: the gauge's characters, full and empty.
    """
    ring = done.ring
    filled = round(10 * ring["kept"] / ring["capacity"])
    gauge = blocks[0] * filled + blocks[1] * (10 - filled)
    parts = [
        f"{done.timing['tokens_per_s']:.1f} tok/s",
        f"ring {gauge} {ring['kept']}/{ring['capacity']}",
        f"{ring['seen']} seen",
        f"{ring['evictions']} eviction{'s' * (ring['evictions'] != 1)}",
    ]
    return " | ".join([*parts, *filter(None, [_ending(done, unfinished)])])


def _ending(done: Completion, unfinished: bool) -> str:
    """Why it ended, where that asks for something."""
    if done.error is not None:
        return f"error: {done.error['message']}; the question was not kept"
    if done.finish_reason == "repetition":
        return "it repeated itself; /retry asks again"
    cut = {"length": f"stopped at max_tokens = {done.sampling['max_tokens']['value']}", "cancelled": "interrupted"}
    text = cut.get(done.finish_reason, "")
    return f"{text}; /continue goes on" if text and unfinished else text


class Terminal:
    """Draws a session on stdin, stdout and stderr.

    Args:
        session: what is drawn.
        interruptible: a context in which Ctrl-C ends the answer; it yields the signals that came.
        stats: print the whole table after each answer.
        quiet: print nothing below an answer but an error.
    """

    def __init__(
        self,
        session: ChatSession,
        interruptible: Callable[[], AbstractContextManager[list[int]]],
        *,
        stats: bool = False,
        quiet: bool = False,
    ) -> None:
        self.session, self.interruptible, self.stats, self.quiet = session, interruptible, stats, quiet
        self.typed, self.drawn = sys.stdin.isatty(), sys.stdout.isatty()
        self._out, self._err = (Console(stderr=err, highlight=False, markup=False) for err in (False, True))
        self._live = self.drawn and not self._out.is_dumb_terminal
        self._blocks = "█░" if self._out.encoding.startswith("utf") else "#."
        self._passing = False  # whether a line is shown that will be erased
        if self.typed and self.drawn:
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401

    def run(self) -> bool:
        """Turns until /quit, the end of the input, or Ctrl-C at the prompt; returns whether a question failed."""
        failed = False
        if self.typed and self.drawn:
            ring = self.session.engine.ring.config
            self._say(f"{self.session.engine.name}, ring {ring.budget} + {ring.window}; /help lists the commands")
        while True:
            try:
                line = read_message(self._ask)
            except (EOFError, KeyboardInterrupt):
                self._write("\n" if self.typed else "")
                return failed
            except UnicodeDecodeError as error:
                self._say(f"input: it is not UTF-8 ({error})")
                failed = True
                continue
            # The keys that are typed meanwhile stay out of what is drawn.
            keys = held_back(sys.stdin.fileno()) if self.typed and self.drawn else nullcontext()
            with self.interruptible() as came, keys:
                try:
                    self.session.on_prefill = self._prefill(came)
                    reply = handle(self.session, line)
                    if reply.quit:
                        return failed
                    if reply.text:
                        self._say(reply.text)
                    if reply.events is not None:
                        failed |= not self._answer(reply.events, came)
                except RingkvError as error:
                    self._say(str(error))
                    failed = True
                finally:
                    self._erase()
            if signal.SIGTERM in came or (came and not self.typed):
                raise KeyboardInterrupt

    def _ask(self, prompt: str) -> str:
        if self.typed and self.drawn:
            return argument_text(input(prompt))
        if self.typed:
            self._err.out(prompt, end="")
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return (line.decode(sys.stdin.encoding) if self.typed else utf8_text(line)).rstrip("\r\n")

    def _prefill(self, came: list[int]) -> Callable[[int, int], None]:
        began = time.monotonic()

        def progress(done: int, layers: int) -> None:
            if came:  # a Ctrl-C from before the engine began
                self.session.engine.cancel(0)
            if time.monotonic() - began > _NOTICEABLE:
                filled = 20 * done // layers
                bar = self._blocks[0] * filled + self._blocks[1] * (20 - filled)
                self._pass(f"reading the prompt {bar} {100 * done // layers}%")

        return progress

    def _answer(self, events: Events, came: list[int]) -> bool:
        """Show an answer as it comes; returns whether it is none of the errors."""
        thought, part, done = 0, "", None
        tags = self.session.engine.prompts.tags
        borders = tags.ids or () if tags is not None else ()
        with closing(events):
            for event in events:
                done = event.completion
                if came:
                    self.session.engine.cancel(0)
                if event.channel == THINKING:
                    thought += sum(token not in borders for token in event.token_ids)
                    if not self.session.show_thinking:
                        self._pass(f"thinking, {thought} tokens")
                        continue
                if not event.text:
                    continue
                if part != event.channel:
                    self._begin(event.channel, thought)
                    part = event.channel
                self._write(event.text, "dim" if part == THINKING else None)
        assert done is not None
        if not part:
            self._begin("", thought)
        self._write("\n")
        self._below(done)
        return done.error is None

    def _begin(self, channel: str, thought: int) -> None:
        """What stands before a thought, or between it and the answer."""
        self._erase()
        if channel == THINKING:
            self._write("" if self.drawn else "[thought]\n")
        elif thought and self.session.show_thinking:
            self._write("\n\n" if self.drawn else "\n[answer]\n")
        elif thought and self.drawn:
            self._write(f"[a thought of {thought} tokens; /think shows it]\n", "dim")

    def _below(self, done: Completion) -> None:
        unfinished = self.session.unfinished
        if self.stats:
            print_stats(done, self.session.engine.prompts.endings)
        elif self.quiet:
            if done.error is not None:
                self._say(_ending(done, unfinished))
        elif self._err.is_terminal and not self._err.is_dumb_terminal:
            lines = [status(done, unfinished, self._blocks), *(f"warning: {warning}" for warning in done.warnings)]
            self._err.out(visible("\n".join(lines), sys.stderr), style="dim", highlight=False)
        else:
            ending = _ending(done, unfinished)
            note(summary(done) + (f"\n[{ending}]" if ending else ""))

    def _say(self, text: str) -> None:
        """What is no part of the conversation."""
        self._erase()
        if self.drawn:
            self._write(f"{text}\n", "dim")
        else:
            note(text)

    def _write(self, text: str, style: str | None = None) -> None:
        if self.drawn:
            self._out.out(visible(text, sys.stdout), style=style, highlight=False, end="")
        else:
            say(text)

    def _pass(self, text: str) -> None:
        """Show a line that will be erased; nothing where that cannot be done."""
        if self._live:
            self._erase()
            self._out.out(text, style="dim", highlight=False, end="")
            self._passing = True

    def _erase(self) -> None:
        if self._passing:
            self._out.control(_ERASE)
            self._passing = False
