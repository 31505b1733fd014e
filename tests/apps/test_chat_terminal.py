"""Chat as a person uses it, on a terminal of its own; and in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps.chat.commands import handle
from ringkv.apps.chat.keys import held_back
from ringkv.apps.chat.session import ChatSession
from ringkv.apps.chat.terminal import Terminal, read_message
from scripted import Script

RINGKV = Path(sys.executable).with_name("ringkv")
OPTIONS = ["--budget", "24", "--window", "4", "--threads", "1", "--seed", "5"]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])")


class Screen:
    """A chat on a pseudo terminal; ``until`` waits for a text and returns what came with it."""

    def __init__(self, folder, *options, term="xterm"):
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environment = {**os.environ, "TERM": term, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("NO_COLOR", None)
        command = [RINGKV, "chat", "-m", folder, *OPTIONS, *options]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.raw = b""

    def until(self, text, timeout=60):
        """What came up to and with ``text``, without escape sequences."""
        came, deadline = b"", time.monotonic() + timeout
        while text not in (plain := ESCAPES.sub("", came.decode(errors="replace"))):
            assert time.monotonic() < deadline, f"{text!r} did not come: {plain!r}"
            if select.select([self.master], [], [], 1)[0]:
                came += os.read(self.master, 1)
        self.raw += came
        return plain.replace("\r\n", "\n")

    def answer(self):
        """The rest of an answer that was cut off, and the line below it."""
        return self.until("/continue goes on") + self.until("\n> ")

    def type(self, text):
        os.write(self.master, text.encode())


def shown(text):
    """A model's text as a terminal gets it."""
    return "".join(char for char in text if char in "\n\t" or (ord(char) >= 32 and not 127 <= ord(char) < 160))


def generated(folder, **params):
    ring = RingConfig(24, 4)
    with Engine.from_pretrained(folder, ring=ring, threads=1) as engine:
        return engine.generate("Hi", SamplingParams(seed=5, **params))


def test_a_conversation_on_a_terminal(tiny_chat_checkpoint):
    """CASES C1, C2, C4: types, is interrupted, resets, quits."""
    done = generated(tiny_chat_checkpoint, max_tokens=30)
    screen = Screen(tiny_chat_checkpoint, "--max-tokens", "30", "--show-thinking")
    assert "ring 24 + 4; /help lists the commands" in screen.until("> ")
    screen.type("Hi\n")
    answer = screen.answer()
    assert shown(done.text) in answer
    ring = done.ring
    assert f"{ring['kept']}/{ring['capacity']} | {ring['seen']} seen | {ring['evictions']} evictions" in answer
    assert "█" in answer
    screen.type("/nosuch thing\n")
    assert "/nosuch is no command and was not sent" in screen.until("> ")
    screen.type("/set max_tokens 1000000\n")
    screen.until("> ")
    screen.type("/set on_repetition ignore\n")
    screen.until("> ")
    screen.type("/set ignore_eos true\n")
    screen.until("> ")
    screen.type("again\n")
    screen.until("again\r\n")
    time.sleep(0.5)
    screen.type("\x03")
    assert "interrupted; /continue goes on" in screen.answer()
    screen.type("/stats\n")
    assert "turns        2;" in screen.until("> ")
    screen.type("/reset\n")
    screen.until("> ")
    for line in ("/set max_tokens 30", "/set ignore_eos false", "/set on_repetition stop"):
        screen.type(line + "\n")
        screen.until("> ")
    screen.type("Hi\n")
    assert shown(done.text) in screen.answer(), "after /reset the same question has the same answer"
    assert b"\x1b[2m" in screen.raw, "what is no answer is dimmed"
    time.sleep(0.3)  # nobody types in the microseconds between the prompt and the wait for a key
    screen.type("\x03")
    screen.until("\n")
    assert screen.process.wait(30) == 0
    assert termios.tcgetattr(screen.slave) == screen.before, "the terminal is restored"


def test_lines_are_edited_and_called_back(tiny_chat_checkpoint):
    """readline: an arrow brings the last line back, and what is typed on it is edited."""
    screen = Screen(tiny_chat_checkpoint, "--max-tokens", "5")
    screen.until("> ")
    screen.type("/system Be brief.\n")
    assert "system: Be brief." in screen.until("\n> ")
    screen.type("\x1b[A\x7f too\n")
    assert "system: Be brief too" in screen.until("\n> ")
    screen.type("\x04")
    assert screen.process.wait(30) == 0


def shows_keys(fd):
    """Whether a terminal shows what is typed, and whether it hands out lines."""
    flags = termios.tcgetattr(fd)[3]
    return bool(flags & termios.ECHO), bool(flags & termios.ICANON)


def endless(folder, *more):
    """A chat in the midst of an answer that does not end, with what came of it."""
    screen = Screen(folder, "--max-tokens", "1000000", "--on-repetition", "ignore", "--stop", "\x01never", *more)
    screen.until("> ")
    screen.type("/set ignore_eos true\n")
    screen.until("\n> ")
    screen.type("Hi\n")
    screen.until("Hi\r\n")
    deadline = time.monotonic() + 60
    while shows_keys(screen.slave) != (False, True):
        assert time.monotonic() < deadline
    assert os.read(screen.master, 1)
    return screen


def test_keys_that_are_typed_while_an_answer_comes_are_the_next_lines(tiny_chat_checkpoint):
    """Oracles: the API for the answer, and a shell for the keys: whole lines run, the rest waits to be edited."""
    done = generated(tiny_chat_checkpoint, max_tokens=300)
    screen = Screen(tiny_chat_checkpoint, "--max-tokens", "300", "--show-thinking")
    screen.until("> ")
    screen.type("Hi\n")
    begun = screen.until(shown(done.text)[:2])
    assert shows_keys(screen.slave) == (False, True)
    screen.type("/set max_tokens 7\n/system Be brief.\n/sta")
    answer = begun + screen.answer()
    assert answer.count(shown(done.text)) == 1
    assert "/set" not in answer.partition(shown(done.text))[0]
    assert "/" not in answer.partition(shown(done.text))[2].partition("\n")[0]
    assert "max_tokens = 7" in screen.until("\n> ")
    assert "system: Be brief." in screen.until("\n> ")
    screen.until("/sta")
    screen.type("ts\n")
    assert "max_tokens 7 (user)" in screen.until("\n> ")
    screen.type("\x04")
    assert screen.process.wait(30) == 0
    assert termios.tcgetattr(screen.slave) == screen.before


@pytest.mark.parametrize(
    "end, code",
    [
        (lambda screen: screen.type("\x03\x03\x03"), {130}),
        (lambda screen: screen.type("\x1c"), {-signal.SIGQUIT}),
        (lambda screen: screen.process.send_signal(signal.SIGHUP), {-signal.SIGHUP}),
        (lambda screen: screen.process.send_signal(signal.SIGTERM), {130}),
    ],
    ids=["Ctrl-C", "Ctrl-\\", "SIGHUP", "SIGTERM"],
)
def test_the_terminal_is_restored_however_an_answer_ends(tiny_chat_checkpoint, end, code):
    screen = endless(tiny_chat_checkpoint)
    end(screen)
    deadline, came = time.monotonic() + 60, b""
    while screen.process.poll() is None:
        assert time.monotonic() < deadline, came[-200:]
        if select.select([screen.master], [], [], 0.5)[0]:
            came += os.read(screen.master, 4096)
        elif came.endswith(b"> "):  # three Ctrl-C that came as one, or one that came before the prompt waited for it
            screen.type("\x03")
    assert screen.process.returncode in code | ({0} if code == {130} else set())
    assert termios.tcgetattr(screen.slave) == screen.before


STOPPED = """
import fcntl, os, pty, signal, sys, termios
from ringkv.apps.chat.keys import held_back
master, slave = pty.openpty()
os.setsid()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
before = termios.tcgetattr(slave)
shown = lambda: bool(termios.tcgetattr(slave)[3] & termios.ECHO)
read, write = os.pipe()
child = os.fork()
if not child:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(slave, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    with held_back(slave):
        os.kill(os.getpid(), signal.SIGTSTP)
        os.write(write, b"on" if shown() else b"off")
    os.write(write, b" same" if termios.tcgetattr(slave) == before else b" other")
    os._exit(0)
_, status = os.waitpid(child, os.WUNTRACED)
print(os.WIFSTOPPED(status), shown())
os.kill(child, signal.SIGCONT)
_, status = os.waitpid(child, 0)
print(status, os.read(read, 99).decode(), shown())
"""


def test_a_chat_that_is_stopped_leaves_the_terminal_as_it_was():
    """Ctrl-Z, as a shell without settings of its own sees it: keys are shown until the chat goes on."""
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True True\n0 off same True\n", "")


def test_keys_are_left_alone_where_there_is_no_terminal():
    read, write = os.pipe()
    with held_back(read):
        os.write(write, b"x")
    assert os.read(read, 1) == b"x"


def test_a_thought_is_folded_and_unfolded():
    script = Script(lambda ids: script.ids("<think>\nhm hm\n</think>\n\nYes<|im_end|>"))
    session = ChatSession(script.engine, SamplingParams(temperature=0), show_thinking=False)
    file = on_terminal(terminal := Terminal(session, never))
    terminal._answer(session.send("Hi"), [])
    folded = file.getvalue()
    assert "hm" not in ESCAPES.sub("", folded)
    count = session.last.thinking_tokens
    assert count == len("\nhm hm\n")
    assert f"[a thought of {count} tokens; /think shows it]" in folded
    assert f"thinking, {count} tokens" in folded
    terminal._say(handle(session, "/think").text)
    assert "hm hm" in file.getvalue()
    terminal._answer(session.send("Hi"), [])
    assert "\x1b[2mh" in file.getvalue().removeprefix(folded), "a thought that is shown is dimmed"


def test_reading_a_long_prompt_shows_how_far_it_is(monkeypatch):
    script = Script(lambda ids: script.ids("Yes<|im_end|>"))
    session = ChatSession(script.engine, SamplingParams(temperature=0))
    file = on_terminal(terminal := Terminal(session, never))
    progress = terminal._prefill([])
    progress(1, 4)
    assert file.getvalue() == "", "nobody waits yet"
    monkeypatch.setattr("ringkv.apps.chat.terminal._NOTICEABLE", -1)
    progress(2, 4)
    assert "reading the prompt ##########.......... 50%" in ESCAPES.sub("", file.getvalue())
    terminal._erase()
    assert file.getvalue().endswith("\r\x1b[2K")
    terminal._live = False
    progress(3, 4)
    assert "75%" not in file.getvalue()
    ended = []
    monkeypatch.setattr(session.engine, "cancel", ended.append)
    terminal._prefill([2])(3, 4)
    assert ended == [0]


@contextmanager
def never():
    """Nobody interrupts."""
    yield []


def on_terminal(terminal):
    """Let a terminal draw as on a real one; returns where to."""
    file = io.StringIO()
    terminal._out = terminal._err = Console(file=file, force_terminal=True, width=100, color_system="standard")
    terminal.drawn = terminal._live = True
    terminal._blocks = "#."
    return file


def test_a_dumb_terminal_gets_no_colour_and_no_bar(tiny_chat_checkpoint):
    screen = Screen(tiny_chat_checkpoint, "--max-tokens", "9", term="dumb")
    screen.until("> ")
    screen.type("Hi\n")
    assert "9 new tokens" in screen.answer()
    screen.type('"""a\n')
    screen.until("... ")
    screen.type('b"""\n')
    screen.answer()
    screen.type("/quit\n")
    assert screen.process.wait(30) == 0
    assert b"\x1b" not in screen.raw
    assert "█" not in screen.raw.decode()


def test_chat_says_what_the_api_says_in_a_pipe(tiny_chat_checkpoint):
    """CASES C3, C4."""
    done = generated(tiny_chat_checkpoint, max_tokens=30)
    command = [RINGKV, "chat", "-m", tiny_chat_checkpoint, *OPTIONS, "--max-tokens", "30"]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        list(map(str, command)),
        input=b"\xef\xbb\xbfHi\n\xff\n/stats\n",
        capture_output=True,
        env=environment,
        timeout=60,
    )
    assert ran.stdout.decode() == done.text + "\n"
    assert "input: it is not UTF-8" in ran.stderr.decode()
    assert f"seed {done.ring['seed']}" in ran.stderr.decode()
    assert b"\x1b" not in ran.stderr
    assert ran.returncode == 1


def test_a_reader_that_leaves_ends_chat_at_once(tiny_chat_checkpoint):
    """CASES C3."""
    command = [RINGKV, "chat", "-m", tiny_chat_checkpoint, *OPTIONS, "--max-tokens", "1000000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*map(str, command), "--on-repetition", "ignore", "--stop", "\x01never"], **pipes)
    process.stdin.write(b"/set ignore_eos true\nHi\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    "lines, message",
    [
        (["Hi"], "Hi"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (["a\\"], "a\n"),
        (['"""', "/a", "", 'b"""'], " /a\n\nb"),
        (['"""a"""'], " a"),
        (['"""a', "b"], " a\nb"),
        (["/system a\\", "b"], "/system a\nb"),
    ],
)
def test_messages_of_several_lines(lines, message):
    left = iter(lines)

    def ask(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    assert read_message(ask) == message
    assert list(left) == []
