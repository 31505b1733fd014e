"""README keeps its word: every command and every piece of Python in it runs, on the real model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.+?)```", README, re.S) for line in block.strip().splitlines()]
# The parts of a line that install or test are what CI itself runs.
COMMANDS = [part for line in LINES for part in line.split(" && ") if not part.startswith(("pip install", "pytest"))]
PYTHON = re.findall(r"```python\n(.+?)```", README, re.S)


def run(command, cwd, input=""):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, input=input, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_readme_holds_what_is_looked_for():
    assert len(COMMANDS) >= 4
    assert all(command.startswith(("ringkv ", "python bench/")) for command in COMMANDS)
    assert len(PYTHON) >= 2
    assert sum(line.endswith("&& pytest") for line in LINES) == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("ringkv ") and "sky.trace" not in c])
def test_command(command, tmp_path):
    done = run(shlex.split(command), tmp_path, input="Hi\n/quit\n")
    assert done.stdout.strip()
    if "--budget 128 --window 32 --max-tokens 400" in command:
        tokens, evictions = (int(re.search(rf"{name} +(\d+)", done.stderr)[1]) for name in ("seen, live", "evictions"))
        assert tokens > 128 + 32
        assert evictions >= 1
        assert len(done.stdout.split()) > 100


def test_the_picture_is_made_by_its_commands(tmp_path):
    for command in (c for c in COMMANDS if "sky.trace" in c):
        run(shlex.split(command), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sky.trace", "sky.html", "survival.png"}
    assert (Path(__file__).parents[1] / "bench" / "survival.png").is_file()


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code, tmp_path):
    run([sys.executable, "-c", code], tmp_path)
