from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ringkv.kernels import compiled
from ringkv.kernels.compiled import CannotCompile, load

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "small.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def runs(monkeypatch):
    """The commands that compile or link."""
    commands, run = [], compiled._run

    def counted(command):
        commands.extend([command] if "-o" in command else [])
        return run(command)

    monkeypatch.setattr(compiled, "_run", counted)
    return commands


def kept(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*"))


@pytest.mark.usefixtures("compiled")
def test_compiles_once(source, runs, tmp_path):
    assert load(source.parent).answer() == 42
    assert load(source.parent).answer() == 42
    assert len(runs) == 2, "one to compile, one to link"
    folder, made = kept(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert re.fullmatch(r"[0-9a-f]{20}\.so", made.name)
    source.write_text(SOURCE.replace("42", "43"))
    assert load(source.parent).answer() == 43
    assert len(kept(tmp_path)) == 3


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("end", [0, 100, -1])
def test_a_torn_file_is_made_again(end, source, runs, tmp_path):
    load(source.parent)
    torn = kept(tmp_path)[1]
    torn.write_bytes(torn.read_bytes()[:end])
    assert load(source.parent).answer() == 42
    assert len(runs) == 4
    assert load(source.parent).answer() == 42
    assert len(runs) == 4


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("where", ["a file", "no home"])
def test_where_nothing_can_be_kept_it_still_compiles(where, source, runs, tmp_path, monkeypatch):
    if where == "a file":
        (tmp_path / "cache").write_text("in the way")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for times in (1, 2):
        assert load(source.parent).answer() == 42
        assert len(runs) == 2 * times
    assert not Path("relative").exists()


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"PATH": "/nonexistent"}, "there is no cc, gcc or clang"),
        ({"CC": "no-such-compiler -m64"}, "CC names no-such-compiler, which is not there"),
        ({"CC": "'cc"}, "CC is no command: No closing quotation"),
        ({"CC": "false"}, "false fails: it does not say why"),
    ],
)
def test_says_why_it_cannot(setting, message, source, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CannotCompile, match=re.escape(message)):
        load(source.parent)


@pytest.mark.usefixtures("compiled")
def test_nowhere_to_compile(source, monkeypatch):
    monkeypatch.setattr(
        compiled.tempfile, "TemporaryDirectory", lambda **_: (_ for _ in ()).throw(OSError("no folder"))
    )
    with pytest.raises(CannotCompile, match="no folder"):
        load(source.parent)


@pytest.mark.usefixtures("compiled")
def test_a_cache_that_may_not_be_read(source, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied")

    for method in ("read_bytes", "exists"):
        monkeypatch.setattr(Path, method, refused)
    assert load(source.parent).answer() == 42


@pytest.mark.usefixtures("compiled")
def test_an_error_of_the_compiler_is_one_line(source):
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(CannotCompile, match=r"fails: .*nothing") as caught:
        load(source.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "maps, message",
    [
        ("", "found: none"),
        (
            "7f r-xp 0 00:00 1 /a b/libgomp.so.1\n7f r-xp 0 00:00 2 /c/libiomp5.so\n7f r--p 0 00:00 2 /c/libiomp5.so\n",
            "found: /a b/libgomp.so.1, /c/libiomp5.so",
        ),
    ],
)
def test_one_openmp_library_is_torchs(maps, message, source, monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: maps if str(self) == "/proc/self/maps" else read(self))
    with pytest.raises(CannotCompile, match=re.escape(message)):
        load(source.parent)


@pytest.mark.usefixtures("compiled")
def test_no_second_openmp_library_is_loaded():
    code = """
import re, torch
from pathlib import Path
from ringkv.kernels.native import library
find = lambda: set(re.findall(r"/\\S*lib[gi]?omp\\d?[-.]\\S*", Path("/proc/self/maps").read_text()))
before = find()
library()
assert find() == before, (before, find())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("refuses", ["cache", "temporary"])
def test_one_of_two_folders_may_be_one_that_executes_nothing(refuses, source, runs, tmp_path, monkeypatch):
    opened = compiled.ctypes.CDLL

    def cdll(path):
        if path.startswith(str(tmp_path / "cache")) == (refuses == "cache"):
            raise OSError("failed to map segment")
        return opened(path)

    monkeypatch.setattr(compiled.ctypes, "CDLL", cdll)
    for _ in range(2):
        assert load(source.parent).answer() == 42
    assert len(runs) == (4 if refuses == "cache" else 2)


@pytest.mark.usefixtures("compiled")
def test_the_next_compiler_is_tried(source, tmp_path, monkeypatch):
    """The first may be one whose threads are not torch's."""
    (tmp_path / "bin").mkdir()
    for name, line in (("cc", "exit 1"), ("gcc", f'exec {shutil.which("cc")} "$@"')):
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert load(source.parent).answer() == 42
    (tmp_path / "bin" / "gcc").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(CannotCompile, match="cc fails: it does not say why; gcc fails: it does not say why"):
        load(source.parent)
