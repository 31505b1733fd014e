"""Every command and every piece of Python in README.md and weights.md runs, on the real model.

Where a command names a hub id, it finds a tiny checkpoint in a hub cache that is made here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringkv.bench.gpu_parts import QWEN3
from ringkv.engine.config import RingConfig
from ringkv.engine.memory import Planner
from ringkv.models.checkpoints.gguf import smollm2_path

ROOT = Path(__file__).parents[1]
README, WEIGHTS = ((ROOT / name).read_text() for name in ("README.md", "weights.md"))
LINES = [
    line for block in re.findall(r"```sh\n(.+?)```", README + WEIGHTS, re.S) for line in block.strip().splitlines()
]
# The parts of a line that install or test are what CI itself runs.
COMMANDS = [part for line in LINES for part in line.split(" && ") if not part.startswith(("pip install", "pytest"))]
FILES_OF_PROMPTS = [command for command in COMMANDS if "--input" in command]
OTHERS = [
    command for command in COMMANDS if "--input" not in command and not {"sky.trace", "a.thought"} & {*command.split()}
]
PYTHON = re.findall(r"```python\n(.+?)```", README, re.S)
(PROMPTS,) = re.findall(r"```json\n(.+?)```", README, re.S)
HUB_IDS = {word for line in COMMANDS for word in shlex.split(line) if re.fullmatch(r"[A-Z][\w-]*/[\w.-]+", word)}
SHA = "0" * 40


@pytest.fixture(scope="module")
def hub_cache(tiny_chat_checkpoint, tmp_path_factory):
    """A hub cache with a tiny checkpoint under every id that the documents name."""
    cache = tmp_path_factory.mktemp("hub")
    for hub_id in HUB_IDS:
        repository = cache / f"models--{hub_id.replace('/', '--')}"
        shutil.copytree(tiny_chat_checkpoint, repository / "snapshots" / SHA)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(SHA)
    return cache


@pytest.fixture
def folder(tiny_chat_checkpoint, tmp_path):
    """Where the commands run: it holds the files that they name."""
    (tmp_path / "my-checkpoint").symlink_to(tiny_chat_checkpoint)
    (tmp_path / "model.gguf").symlink_to(smollm2_path())
    return tmp_path


def run(command, cwd, input="", **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, input=input, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_readme_holds_what_is_looked_for():
    assert len(COMMANDS) >= 10
    assert len(HUB_IDS) >= 3
    assert all(command.startswith("ringkv ") for command in COMMANDS)
    assert len(PYTHON) >= 2
    assert len(FILES_OF_PROMPTS) == 1
    assert sum(line.endswith("&& pytest") for line in LINES) == 1


@pytest.mark.parametrize("command", OTHERS)
def test_command(command, folder, hub_cache):
    done = run(shlex.split(command), folder, input="Hi\n/quit\n", HF_HUB_CACHE=str(hub_cache))
    assert done.stdout.strip()
    if "--budget 128 --window 32 --max-tokens 400" in command:
        tokens, evictions = (int(re.search(rf"{name} +(\d+)", done.stderr)[1]) for name in ("seen, live", "evictions"))
        assert tokens > 128 + 32
        assert evictions >= 1
        assert len(done.stdout.split()) > 100


def test_a_file_of_prompts(folder, hub_cache):
    """The rows and the command of README, with fewer tokens: a random model seldom ends by itself."""
    (command,) = FILES_OF_PROMPTS
    short, limits = re.subn(r"(--max-(?:thinking-)?tokens) \d+", r"\1 40", command)
    assert limits == 2
    (folder / "prompts.jsonl").write_text(PROMPTS)
    run(shlex.split(short), folder, HF_HUB_CACHE=str(hub_cache))
    given = [json.loads(line) for line in PROMPTS.splitlines()]
    results = {line["id"]: line for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    assert results.keys() == {row["id"] for row in given}
    for row in given:
        result = results[row["id"]]
        assert {"prompt", "messages", "params"}.isdisjoint(result)
        done = result["ringkv"]
        assert done["error"] is None
        assert {"text", "thinking", "finish_reason", "sampling", "timing"} <= done.keys()
        assert done["completion_tokens"] in range(1, 41)
        assert done["ring"]["budget"] == int(re.search(r"--budget (\d+)", command)[1])
        assert done["sampling"]["temperature"]["value"] == row.get("params", {}).get("temperature", 0.6)


def test_the_memory_of_qwen3_4b_is_what_its_plan_says():
    weights, lane, lanes, tokens, cache = re.search(
        r"weights take ([\d.]+) GiB and each lane .+ takes ([\d.]+) GiB.+"
        r"for (\d+) texts of ([\d,]+) tokens would take (\d+) GiB",
        " ".join(README.split()),
    ).groups()
    plan = Planner(QWEN3["Qwen3-4B"], torch.bfloat16).plan(RingConfig(4096), 1)
    assert f"{plan.weights_bytes / 2**30:.1f}" == weights
    assert f"{plan.ring_bytes / 2**30:.1f}" == lane
    assert f"{plan.token_bytes * int(lanes) * int(tokens.replace(',', '')) / 2**30:.0f}" == cache


def test_the_picture_is_made_by_its_commands(tmp_path):
    for command in (c for c in COMMANDS if "sky.trace" in c):
        run(shlex.split(command), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sky.trace", "sky.html", "survival.png"}
    assert (ROOT / "bench" / "survival.png").is_file()


def test_a_saved_text_and_the_rest_of_it_are_the_whole(tmp_path):
    """Oracle: one run of as many tokens."""
    begin, state, rest = (shlex.split(command) for command in COMMANDS if "a.thought" in command)
    printed = run(begin, tmp_path).stdout
    assert re.search(r"tokens +\d+ prompt, \d+ new", run(state, tmp_path).stdout)
    printed += run(rest, tmp_path).stdout
    whole = [*begin[: begin.index("--max-tokens")], "--max-tokens", "800"]
    assert rest[-2:] == whole[-2:]
    assert printed == run(whole, tmp_path).stdout
    assert len(printed) > 1000


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code, tmp_path):
    assert run([sys.executable, "-c", code], tmp_path).returncode == 0


def test_the_server_answers_16_clients():
    """README's server, driven as ASGI says, on the real model. Oracle: the engine asked alone; one client leaves."""
    (code,) = (code for code in PYTHON if "async def app" in code)
    code = code.replace("max_tokens=500", "max_tokens=12, temperature=0")
    exec(compile(code, "README.md", "exec"), server := {"__name__": "server"})
    prompts = [f"What is {number} plus one?" for number in range(16)]

    async def client(number):
        body, answer = prompts[number].encode(), []
        parts = [
            {"type": "http.request", "body": body[:5], "more_body": True},
            {"type": "http.request", "body": body[5:]},
        ]

        async def receive():
            return parts.pop(0)

        async def send(message):
            answer.append(message)
            if number == 3 and len(answer) > 2:
                raise OSError("the client has left")

        try:
            await server["app"]({"type": "http"}, receive, send)
        except OSError:
            assert number == 3
        assert answer[0]["status"] == 200
        assert number == 3 or answer[-1] == {"type": "http.response.body", "body": b""}
        return b"".join(message.get("body", b"") for message in answer).decode()

    async def clients():
        return await asyncio.gather(*(client(number) for number in range(16)))

    with server["engine"] as engine:
        answers = asyncio.run(clients())
        alone = [engine.generate(prompt, server["PARAMS"]).text for prompt in prompts]
    assert alone[3].startswith(answers.pop(3))
    del alone[3]
    assert answers == alone
