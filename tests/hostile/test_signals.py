"""A signal ends a command in order, and within two seconds, whatever it is doing.

What a test may not hang on is how fast the machine is: a signal's end is measured in the processor's time, and where an
orderly end is looked for, the process may take as long as it likes for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ringkv.kernels import native, prefill_attention
from ringkv.kernels.backend import use
from ringkv.kernels.blocks import pausing
from ringkv.kernels.table import causal_attention

LONG = 90_000  # tokens of a prompt
CHILD = """
import os, sys
from ringkv.__main__ import main
from ringkv.apps import ending

def announced(owner, name):
    of = getattr(owner, name)
    def calling(*arguments, **options):
        os.write(1, b"ready\\n")
        return of(*arguments, **options)
    setattr(owner, name, calling)

{}
sys.argv[0] = "ringkv"
main()
"""
PREFILL = """
ending.WITHIN = 1e9
from ringkv.engine.runner import Runner
prefill = Runner.prefill
def long(runner, lane, ids, *more):
    if len(ids) > 10_000: os.write(1, b"ready\\n")
    return prefill(runner, lane, ids, *more)
Runner.prefill = long
"""
TOKENIZE = "from ringkv.models.tokenizer import Tokenizer; announced(Tokenizer, '_encoding')"
PLAN = "ending.WITHIN = 1e9; from ringkv.engine.memory import Planner; announced(Planner, '__init__')"
WRITE = "import time; os.fsync = lambda fd: time.sleep(600); announced(os, 'fsync')"


def processor_time(pid):
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ended(script, arguments, number, after=0.0):
    """What a command prints, beside "ready", that gets a signal once it is there and has worked so long."""
    command = [sys.executable, "-c", CHILD.format(script), *map(str, arguments)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            assert process.stdout.readline() == b"ready\n", process.stderr.read()
            then = processor_time(process.pid)
            while processor_time(process.pid) < then + after:
                time.sleep(0.01)
            then = processor_time(process.pid)
            process.send_signal(number)
            out, err = process.stdout.read(), process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert used.ru_utime + used.ru_stime - then < 2.5
    return out.replace(b"ready\n", b"").decode(), err.decode()


@pytest.fixture
def options(tiny_chat_checkpoint):
    return ["-m", tiny_chat_checkpoint, "--dtype", "float32", "--budget", "24", "--window", "4", "--temperature", "0"]


@pytest.mark.parametrize(
    "policy, backend, number",
    [
        ("vase-attnv", "native", signal.SIGTERM),
        ("vase-attnv", "torch", signal.SIGINT),
        ("h2o", "native", signal.SIGINT),
    ],
)
def test_a_long_prompt_that_is_read(options, tmp_path, policy, backend, number, compiled):
    (tmp_path / "prompt").write_text("a" * LONG)
    path = ["--policy", policy, "--backend", backend]
    _, err = ended(PREFILL, ["generate", "--raw", "--prompt-file", tmp_path / "prompt", *options, *path], number, 1.0)
    assert "0 new tokens" in err
    assert "interrupted" in err


def test_a_file_of_prompts(options, tmp_path):
    rows = [{"prompt": "Hi", "params": {"max_tokens": 3}}, {"prompt": "a" * LONG}]
    (tmp_path / "in").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--lanes", "1"]
    _, err = ended(PREFILL, ["generate", "--raw", *files, *options], signal.SIGINT, 0.5)
    assert "interrupted; the same command goes on from there" in err
    assert [json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines()] == ["1"]


def test_a_prompt_that_is_tokenised(options, tmp_path):
    """In one call of the tokenizer's library, for longer than two seconds."""
    (tmp_path / "prompt").write_text("some words " * 2_000_000)
    assert ended(TOKENIZE, ["generate", "--raw", "--prompt-file", tmp_path / "prompt", *options], signal.SIGTERM) == (
        "",
        "",
    )


def test_a_plan(options):
    assert ended(PLAN, ["plan", *options[1:2], "--budget", "auto", "--lanes", "auto"], signal.SIGTERM) == ("", "")


def test_a_result_whose_disk_does_not_answer(options, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "Hi"}\n')
    files = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    assert ended(WRITE, ["generate", *files, *options, "--max-tokens", "3"], signal.SIGINT) == ("", "")


@pytest.mark.parametrize("heads, kv_heads, d", [(9, 3, 64), (32, 8, 128)])
def test_the_blocks_of_a_long_prompt_are_short(heads, kv_heads, d, cpu_path, monkeypatch):
    """Of SmolLM2, and of a model of 8B parameters: in the time of the processor, the longest of its blocks."""
    n = LONG if d == 64 else LONG // 4
    q, k, v = (torch.randn(n, each, d) for each in (heads, kv_heads, kv_heads))
    scratch = torch.empty(native.library().causal_scratch(heads // kv_heads, d))

    class Enough(Exception):
        pass

    def enough():
        raise Enough

    def last(n, size, like):
        yield range(0, n, size)[-2]
        raise Enough

    monkeypatch.setattr(prefill_attention, "blocks", last)  # torch comes to the longest last, and C at first
    began = time.thread_time()
    with use(cpu_path), pausing(enough), pytest.raises(Enough):
        causal_attention(q, k, v, scratch)
    assert time.thread_time() - began < 1.5
