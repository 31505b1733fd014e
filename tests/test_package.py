"""The distribution: what a wheel holds, and that it runs outside the clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("apps", "engine", "models", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built in a copy, since building leaves its traces in the tree."""
    copy = tmp_path_factory.mktemp("wheel") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "tests", "bench", "build", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('out'))"
    (copy / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (copy / "out").glob("*.whl")
    return made


def test_a_wheel_holds_every_file_of_the_package(wheel):
    kinds = (".py", ".c", ".h", ".html", ".css", ".js")
    found = [*ROOT.glob("*.py"), *(path for floor in FLOORS for path in (ROOT / floor).rglob("*"))]
    files = [path for path in found if path.suffix in kinds]
    wanted = {f"ringkv/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert len(wanted) > 100
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ringkv/")}
    assert held == wanted


def test_a_wheel_works_outside_the_clone(wheel, tmp_path):
    """Unpacked where nothing else of the package is, with the C files compiled from there."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import ringkv, pathlib; from ringkv.kernels import backend; import torch;"
        "print(pathlib.Path(ringkv.__file__).parents[1].name, backend.path_of(torch.empty(0)))"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("-c", code) == "site native"
    assert run("-m", "ringkv", "--version").startswith("ringkv ")
    assert "vase-attnv" in run("-m", "ringkv", "policies")
