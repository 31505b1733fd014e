"""generate --trace and ringkv trace, as a person uses them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import matplotlib.image
import pytest
from typer.testing import CliRunner

from ringkv.apps.trace.trace import Trace
from ringkv.cli import app
from traces import Page, made

TINY = ["--budget", "24", "--window", "4", "--threads", "1", "--seed", "1"]


def run(*arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def tiny(tiny_chat_checkpoint):
    return tiny_chat_checkpoint


def test_a_generation_is_traced_and_drawn(tiny, tmp_path):
    path, page, picture = (tmp_path / f"run.{kind}" for kind in ("trace", "html", "png"))
    untraced = run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 60)
    code, out, _ = run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 60, "--trace", path)
    assert (code, out) == untraced[:2]
    trace = Trace.load(path)
    assert len(trace.token_ids) == trace.prompt_tokens + 60
    assert min(trace.evictions) > 5
    assert trace.model == str(tiny)
    page.write_text("old")
    assert run("trace", path, "--html", page, "--png", picture) == (0, "", "")
    assert [text for _, text, _ in Page(page.read_text(encoding="utf-8")).spans][-1] == trace.texts[-1]
    assert matplotlib.image.imread(picture).ndim == 3


def test_without_a_flag_it_says_the_main_things(tmp_path):
    trace = made(3, 2, 12, 60)
    trace.save(tmp_path / "made.trace")
    code, out, err = run("trace", tmp_path / "made.trace")
    lines = {line[:16].strip(): line[16:].strip() for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert lines["text"] == "12 prompt tokens, 49 new; 60 read; ended: length"
    assert lines["evictions"] == "4 to 5 a layer"
    live = trace.live()
    shares = f"{live[..., :12].mean():.1%} of the prompt, {live[..., 12:].mean():.1%} of the answer"
    assert lines["held at the end"] == shares
    assert lines["tokens"] == f"{live.all((0, 1)).sum()} held by every pair, {60 - live.any((0, 1)).sum()} by none"
    assert lines["loop"] == "none"
    assert list(tmp_path.iterdir()) == [tmp_path / "made.trace"]


@pytest.mark.parametrize(
    "more, message",
    [
        (["-n", "2", "--trace", "a.trace"], "--trace: it records one sample; accepted is -n 1, not 2"),
        (["--trace", "no/a.trace"], "--trace 'no/a.trace': there is no folder 'no'; accepted is the name of a file"),
        (["--trace", "."], "--trace '.': it is a folder; accepted is the name of a file"),
        (
            ["--trace", "a.trace", "--window", "1", "--max-tokens", "70000"],
            "trace: max_tokens and window allow 69997 evictions a layer",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_at_the_start(tiny, tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("generate", "Hi", "-m", tiny, *TINY, *more)
    assert (code, out) == (2, "")
    assert err.startswith(f"ringkv: {message}")
    assert err.count("\n") == 1


def test_a_file_of_prompts_is_not_traced(tmp_path):
    code, _, err = run("generate", "--input", "a", "--output", "b", "--trace", tmp_path / "c")
    assert code == 2
    assert err == "ringkv: --trace: it records one prompt; accepted is no --input with it\n"


def test_what_cannot_be_drawn_is_refused(tmp_path):
    (tmp_path / "text").write_text("Hello")
    made(1, 1, 4, 9).save(tmp_path / "made.trace")
    code, out, err = run("trace", tmp_path / "text")
    assert (code, out) == (2, "")
    assert err.startswith(f"ringkv: trace '{tmp_path}/text': it is no whole safetensors file")
    code, _, err = run("trace", tmp_path)
    assert (code, err) == (2, f"ringkv: trace '{tmp_path}': it is a folder; accepted is what generate --trace wrote\n")
    code, _, err = run("trace", tmp_path / "made.trace", "--html", tmp_path / "no" / "a.html")
    assert code == 2
    assert err.startswith("ringkv: --html ")
    code, _, err = run("trace", tmp_path / "made.trace", "--png", tmp_path)
    assert code == 2
    assert err.startswith("ringkv: --png ")
    assert err.count("\n") == 1


def test_no_file_takes_the_place_of_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(1, 1, 4, 9).save("a.trace")
    os.symlink("a.trace", "link")
    os.mkfifo("pipe")
    (tmp_path / "prompt").write_text("Hi")
    before = (tmp_path / "a.trace").read_bytes()
    twice, other = "this command names it twice", "it is no regular file"
    for command, option, path, why in (
        ("trace a.trace", "--html", "a.trace", twice),
        ("trace a.trace", "--png", "link", twice),
        ("trace a.trace --png new", "--html", "./new", twice),
        ("trace a.trace", "--html", "pipe", other),
        ("generate --prompt-file prompt", "--trace", "prompt", twice),
        ("generate Hi", "--trace", "pipe", other),
    ):
        code, out, err = run(*command.split(), option, path)
        assert (code, out) == (2, "")
        assert err == f"ringkv: {option} {str(Path(path))!r}: {why}; accepted is the name of a file\n"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, _, err = run("trace", "a.trace", "--html", "a.html")
    assert code == 2
    assert err.endswith("cannot be written to; accepted is the name of a file\n")
    assert (tmp_path / "a.trace").read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"a.trace", "link", "pipe", "prompt"}


def test_an_interrupted_generation_keeps_its_trace(tiny, tmp_path, monkeypatch):
    from ringkv.engine.engine import Engine

    stream = Engine.stream

    def interrupted(self, *arguments, **options):
        for place, event in enumerate(stream(self, *arguments, **options)):
            if place == 20:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(Engine, "stream", interrupted)
    path = tmp_path / "cut.trace"
    code, _, _ = run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 60, "--trace", path)
    assert code == 130
    trace = Trace.load(path)
    assert trace.finish_reason == "cancelled"
    assert trace.prompt_tokens + 10 < len(trace.token_ids) < trace.prompt_tokens + 30
