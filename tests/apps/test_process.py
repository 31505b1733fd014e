"""What a command does with its streams, with the size of its terminal and with signals: locales, pipes, full disks."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps import process
from ringkv.apps.options import Options, argument_text
from ringkv.cli import app
from ringkv.engine import Prompts

TINY = ["--budget", "24", "--window", "4", "--threads", "1", "--temperature", "0", "--on-repetition", "ignore"]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def start(*arguments, env=None, **streams):
    """The command line in a process of its own, buffered as Python does by itself."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    for name in {"PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING", "COLUMNS"} - set(env or {}):
        environment.pop(name, None)
    command = [sys.executable, "-m", "ringkv", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **{"stdin": subprocess.DEVNULL, **streams})


def run(*arguments, **more):
    process = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def tiny(tiny_chat_checkpoint, tmp_path_factory):
    """A checkpoint in a folder with a Japanese name."""
    folder = tmp_path_factory.mktemp("names") / "日本語"
    folder.symlink_to(tiny_chat_checkpoint)
    return folder


@pytest.fixture(scope="module")
def done(tiny):
    """What the API says to a prompt, a system message and a stop string in three languages."""
    with Engine.from_pretrained(tiny, ring=RingConfig(24, 4), threads=1) as engine:
        messages = [{"role": "system", "content": "Größe"}, {"role": "user", "content": "é 日本"}]
        params = SamplingParams(temperature=0, max_tokens=150, stop=("ü日",), on_repetition="ignore")
        return engine.generate(messages, params)


ASKED = ["é 日本", "--system", "Größe", "--stop", "ü日", "--max-tokens", "150"]
LOCALES = [
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "cp1252:strict"},
    ASCII,
]


@pytest.mark.parametrize("env", LOCALES, ids=lambda env: "-".join(env.values()))
def test_a_pipe_gets_utf_8_whatever_the_locale(tiny, done, env):
    """Oracle: the API, with the same texts."""
    assert "�" in done.text, "what no single-byte encoding has"
    code, out, err = run("generate", *ASKED, "-m", tiny, *TINY, env=env)
    assert (code, out.decode()) == (0, done.text + "\n"), err
    code, out, err = run("generate", *ASKED, "-m", tiny, *TINY, "--json", "--quiet", env=env)
    told = json.loads(out)
    assert (code, err) == (0, b"")
    assert {name: told[name] for name in ("text", "token_ids", "prompt_tokens", "model")} == {
        name: getattr(done, name) for name in ("text", "token_ids", "prompt_tokens", "model")
    }


def test_names_of_files_in_a_locale_without_their_characters(tiny, tmp_path):
    """A folder, a trace, its page and results: the name is what it is where the locale has it."""
    code, out, err = run("plan", tiny, env=ASCII)
    assert (code, err) == (0, b"")
    assert out.decode().startswith(f"{tiny}: budget 4096")
    assert json.loads(run("plan", tiny, "--json", env=ASCII)[1])["model"] == str(tiny)
    (source := tmp_path / "寿.jsonl").write_text('{"prompt": "Hi"}\n')
    options = ["-m", tiny, *TINY, "--max-tokens", "3"]
    code, _, err = run("generate", "--input", source, "--output", tmp_path / "司.jsonl", *options, env=ASCII)
    lines = err.decode().splitlines()
    assert (code, len(lines)) == (0, 2), lines
    assert lines[0].startswith("[1 of 1 results")
    assert lines[1].startswith("results with warnings: 1;")
    assert json.loads((tmp_path / "司.jsonl").read_text())["ringkv"]["model"] == str(tiny)
    assert run("generate", "Hi", *options, "--trace", tmp_path / "跡", env=ASCII)[0] == 0
    assert run("trace", tmp_path / "跡", "--html", tmp_path / "頁.html", env=ASCII)[::2] == (0, b"")
    assert str(tiny) in (tmp_path / "頁.html").read_text()
    code, out, err = run("plan", tmp_path / "無", env=ASCII)
    assert (code, out) == (2, b"")
    assert f"{tmp_path / '無'}" in err.decode() or "\\udce7" in err.decode()


def on_terminal(*arguments, size=(0, 0), **more):
    """The exit code, and what a terminal of so many rows and columns gets."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = start(*arguments, stdout=slave, stderr=slave, **more)
    os.close(slave)
    came = b""
    while select.select([master], [], [], 300)[0]:
        try:
            came += os.read(master, 4096)
        except OSError:  # the process has ended
            break
    return process.wait(), came.replace(b"\r\n", b"\n")


def test_a_terminal_gets_its_own_encoding(tiny, done):
    code, came = on_terminal("generate", *ASKED, "-m", tiny, *TINY, "-q", env={"PYTHONIOENCODING": "latin-1"})
    shown = CONTROL.sub("", done.text)
    assert (code, came) == (0, shown.encode("latin-1", "replace") + b"\n")
    code, came = on_terminal("plan", tiny, "--json", env={"PYTHONIOENCODING": "latin-1"})
    assert (code, json.loads(came.decode("ascii"))["model"]) == (0, str(tiny)), "JSON loses nothing"


@pytest.mark.parametrize(
    "text, encoding, data",
    [
        ("né 日本\n", "ascii", b"n? ??\n"),
        ("né 日本\n", "latin-1", b"n\xe9 ??\n"),
        ("né \N{EURO SIGN} 日", "cp1252", b"n\xe9 \x80 ?"),
        ("日本", "shift_jis", "日本".encode("shift_jis")),
        ("한", "shift_jis", b"?"),
        (b"a\xe6\x97\xa5b".decode("ascii", "surrogateescape"), "ascii", "a日b".encode()),
        (b"a\xe6\x97\xa5b".decode("ascii", "surrogateescape"), "utf-8", "a日b".encode()),
        (b"a\xff\xe6b".decode("ascii", "surrogateescape"), "utf-8", b"a??b"),
        ("a\ud83db", "utf-8", b"a?b"),
    ],
)
def test_what_a_stream_lacks_is_replaced(text, encoding, data):
    process.prepare_streams()
    assert text.encode(encoding, "ringkv.unwritable") == data


@pytest.mark.parametrize("text", ["é", "日本 ", "plain"])
def test_arguments_are_utf_8_where_the_locale_does_not_know(text):
    assert argument_text(text.encode().decode("ascii", "surrogateescape")) == argument_text(text) == text
    for broken in ("\ud83d", b"\xff".decode("ascii", "surrogateescape")):
        assert argument_text(text + broken) == text + broken


def test_an_argument_that_is_no_text_is_refused(tiny):
    code, out, err = run("generate", b"\xff".decode("utf-8", "surrogateescape"), "-m", tiny, *TINY, env=ASCII)
    assert (code, out, err.count(b"\n")) == (2, b"", 1)
    assert b"half a surrogate pair" in err


@pytest.mark.parametrize(
    "arguments, env",
    [
        (["generate", "Hi", *TINY], {}),
        (["generate", "Hi", *TINY], {"PYTHONUNBUFFERED": "1"}),
        (["generate", "--input", "-", "--output", "-", *TINY], {}),
        (["chat", *TINY], {}),
        (["plan", "--json"], {}),
    ],
)
def test_a_full_disk_is_named(tiny, arguments, env):
    with open("/dev/full", "wb") as full:
        process = start(*arguments, "-m", tiny, env=env, stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(b'{"prompt": "Hi"}\n', timeout=300)
    assert (process.returncode, err.decode()) == (1, "ringkv: stdout: No space left on device\n")


def test_stderr_that_is_full_changes_nothing(tiny):
    with open("/dev/full", "wb") as full:
        pipe = {"stdout": subprocess.PIPE, "stderr": full}
        for more, code in (([], 0), (["--stats"], 0), (["--budget", "0"], 2), (["--nosuch"], 2)):
            process = start("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", "3", *more, **pipe)
            out, _ = process.communicate(timeout=300)
            assert (process.returncode, bool(out)) == (code, not code)


def test_a_pipe_that_must_not_block_is_waited_for():
    """As it is where another program has the same terminal or pipe; oracle: the reader."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    text, came = "0123456789" * 50_000, b""
    stream = io.TextIOWrapper(io.BufferedWriter(process._Stream(write, "stdout")), "utf-8")

    def read_slowly():
        nonlocal came
        time.sleep(0.2)
        while data := os.read(read, 4096):
            came += data

    reader = threading.Thread(target=read_slowly)
    reader.start()
    stream.write(text)
    stream.close()
    os.close(write)
    reader.join(60)
    os.close(read)
    assert came.decode() == text


def test_an_answer_is_not_changed_on_its_way(tiny, monkeypatch, capfdbinary):
    """Escape sequences are a part of it."""
    text = "\x1b[31mred\x1b[0m\r\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(process._Stream(1, "stdout")), "utf-8"))
    process.say(text)
    assert capfdbinary.readouterr().out.decode() == text


@pytest.fixture(scope="module")
def hostile(tiny, tmp_path_factory):
    """The tiny checkpoint under a name that is an escape sequence, with a chat template that fails with another."""
    folder = tmp_path_factory.mktemp("names") / HOSTILE
    shutil.copytree(tiny, folder, symlinks=False)
    keys = {"eos_token": "<|im_end|>", "chat_template": f"{{{{ raise_exception({HOSTILE!r}) }}}}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["generate", "Hi", "--raw", *TINY[:-4], "--seed", "3", "--max-tokens", "150", *TINY[-2:], "--stats"], 0),
        (["generate", "Hi", "--raw", *TINY[:-4], "--seed", "3", "--max-tokens", "150", *TINY[-2:], "--json", "-q"], 0),
        (["generate", "Hi", *TINY], 2),
        (["generate", "Hi", *TINY, "--debug"], 1),
        (["plan"], 0),
    ],
)
def test_a_terminal_obeys_nothing_that_a_model_or_a_file_says(hostile, arguments, code):
    """Oracle: the bytes in a pipe, which are what was said."""
    where = ["-m", hostile] if arguments[0] != "plan" else [hostile]
    ended, out, err = run(*arguments, *where)
    assert ended == code
    piped = (out + err).decode()
    json_alone = "--json" in arguments
    assert json_alone or CONTROL.search(piped)
    ended, came = on_terminal(*arguments, *where)
    came = came.decode()
    assert ended == code
    assert not CONTROL.search(came)
    if json_alone:
        assert json.loads(came)["text"] == json.loads(piped)["text"]
        assert CONTROL.search(json.loads(came)["text"])
    elif "--stats" in arguments:
        assert came.startswith(CONTROL.sub("", out.decode())[:-1])
    else:
        assert "]0;owned[31m2J" in came


def test_a_trace_that_names_an_escape_sequence_is_shown_without_it(hostile, tmp_path):
    code, _, err = run("generate", "Hi", "--raw", "-m", hostile, *TINY, "--max-tokens", "3", "--trace", tmp_path / "t")
    assert code == 0, err
    code, came = on_terminal("trace", tmp_path / "t")
    assert (code, b"]0;owned" in came, CONTROL.search(came.decode())) == (0, True, None)


WIDTHS = ["0", "-5", "abc", "1000000000", "²", "", "9" * 5000, "5", "40", None]


@pytest.mark.parametrize("columns", WIDTHS, ids=lambda columns: str(columns)[:10])
def test_tables_appear_whole_whatever_the_width(tiny, columns):
    """Oracle: the same as JSON."""

    def shown(*arguments):
        env = dict.fromkeys(("COLUMNS", "LINES", "TERMINAL_WIDTH"), columns)
        done = CliRunner().invoke(app, list(map(str, arguments)), env=env)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    figures = json.loads(shown("plan", tiny, "--memory", "1GiB", "--json"))
    words = set(shown("plan", tiny, "--memory", "1GiB").split())
    assert words >= {str(table["bytes"]) for table in figures["tables"].values()}
    assert words >= {str(figures["total_bytes"]), "queries", f"{tiny}:"}
    table = shown("policies")
    assert "…" not in table
    assert set(table.split()) >= {row["name"] for row in json.loads(shown("policies", "--json"))}
    if columns != "40":
        assert "--budget" in shown("plan", "--help")
        assert max(map(len, shown("plan", "--help").splitlines())) < 10**4


@pytest.mark.parametrize("size", [(0, 0), (24, 3)])
def test_a_terminal_without_a_size_gets_whole_tables(size):
    code, came = on_terminal("policies", size=size)
    assert code == 0
    assert b"vase-attnv" in came


SIGNALLED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), {number})
                for _ in range(1000): pass
            except KeyboardInterrupt:
                pass  # as an import with a bare except
sys.meta_path.insert(0, Finder())
sys.argv = ["ringkv", *sys.argv[1:]]
from ringkv.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name, number",
    [
        ("ringkv.cli", signal.SIGTERM),
        ("typer", signal.SIGINT),
        ("ringkv.engine", signal.SIGINT),
        ("torch", signal.SIGINT),
        ("tokenizers", signal.SIGINT),
        ("tokenizers", signal.SIGTERM),
    ],
)
def test_a_signal_among_the_imports_ends_it_with_130(tiny, name, number):
    code = SIGNALLED.format(name=name, number=int(number))
    command = [sys.executable, "-c", code, "generate", "Hi", "-m", str(tiny), *TINY, "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


DEAF = """
import hashlib, os, signal, sys, time
from ringkv.__main__ import main
from ringkv.apps import ending
from ringkv.apps.options import Options
def engine(*_):
    print("ready", flush=True)
    {}
Options.engine = engine
sys.argv = ["ringkv", "generate", "Hi"]
main()
"""
IN_C = 'hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)'  # for minutes, and no handler runs
SWALLOWING = """
    while True:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            pass"""


@pytest.mark.parametrize(
    "work, signals",
    [
        (IN_C, [signal.SIGTERM]),
        (IN_C, [signal.SIGINT]),
        (f"ending.WITHIN = 1e9; {IN_C}", [signal.SIGTERM, signal.SIGTERM]),
        (SWALLOWING, [signal.SIGTERM]),
    ],
)
def test_a_signal_that_nobody_hears_ends_it(work, signals):
    """A second one does at once, whatever the first may wait for."""
    with subprocess.Popen([sys.executable, "-c", DEAF.format(work)], stdout=-1, stderr=-1) as process:
        assert process.stdout.readline() == b"ready\n"
        for number in signals:
            time.sleep(0.2)  # two of a kind that come together are one
            process.send_signal(number)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert process.stderr.read() == b""


def test_a_signal_while_a_prompt_is_tokenised_is_not_forgotten(tiny, monkeypatch, capfd):
    prepare = Prompts.prepare

    def signalled(*arguments, **options):
        requests = prepare(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        return requests

    monkeypatch.setattr(Prompts, "prepare", signalled)
    ended = CliRunner().invoke(app, ["generate", "Hi", "-m", str(tiny), *TINY, "--max-tokens", "3"])
    assert (ended.exit_code, ended.stdout) == (130, "")


def test_the_console_script_is_the_module():
    """Its first import is light, and handles signals before it imports what is not."""
    root = Path(process.__file__).parents[1]
    assert '\nringkv = "ringkv.__main__:main"\n' in (root / "pyproject.toml").read_text()
    code = "import sys, ringkv.__main__; print(sorted({'typer', 'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"[]\n"


def test_an_interrupt_in_a_finaliser_is_not_lost(capfd):
    class Late:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def interrupted():
        with process.reporting(False):
            Late()
            time.sleep(30)

    with pytest.raises(typer.Exit) as ended:
        interrupted()
    assert ended.value.exit_code == 130
    assert capfd.readouterr() == ("", "")
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As with nohup, and in the background of a script."""

    class Asked:
        def cancel(self, index):
            raise AssertionError

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with process.reporting(False), process.interrupt_cancels(Asked()) as came:
            signal.raise_signal(number)
        assert came == []
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("quiet, bars", [("--quiet", "1"), ("--stats", "0")])
def test_downloads_are_silent_where_a_command_is_to_be_quiet(monkeypatch, quiet, bars):
    """The hub's client reads this variable when it is imported, in a download."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    seen = []

    def engine(self, lanes):
        seen.append(os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"))
        raise MemoryError

    monkeypatch.setattr(Options, "engine", engine)
    assert CliRunner().invoke(app, ["generate", "Hi", quiet]).exit_code == 1
    assert CliRunner().invoke(app, ["chat", quiet]).exit_code == 1
    assert seen == [bars, bars]
