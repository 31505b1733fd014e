from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ringkv.kernels import cache, compiled
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
    assert load(source.parent, ["answer"]).answer() == 42
    assert load(source.parent, ["answer"]).answer() == 42
    assert len(runs) == 2, "one to compile, one to link"
    folder, made = kept(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert re.fullmatch(r"[0-9a-f]{20}\.so", made.name)
    source.write_text(SOURCE.replace("42", "43"))
    assert load(source.parent, ["answer"]).answer() == 43
    assert len(kept(tmp_path)) == 3


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("end", [0, 100, -1])
def test_a_torn_file_is_made_again(end, source, runs, tmp_path):
    load(source.parent, ["answer"])
    torn = kept(tmp_path)[1]
    torn.write_bytes(torn.read_bytes()[:end])
    assert load(source.parent, ["answer"]).answer() == 42
    assert len(runs) == 4
    assert load(source.parent, ["answer"]).answer() == 42
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
        assert load(source.parent, ["answer"]).answer() == 42
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
        load(source.parent, ["answer"])


@pytest.mark.usefixtures("compiled")
def test_nowhere_to_compile(source, monkeypatch):
    monkeypatch.setattr(
        compiled.tempfile, "TemporaryDirectory", lambda **_: (_ for _ in ()).throw(OSError("no folder"))
    )
    with pytest.raises(CannotCompile, match="no folder"):
        load(source.parent, ["answer"])


@pytest.mark.usefixtures("compiled")
def test_a_cache_that_may_not_be_read(source, monkeypatch):
    opened = os.open

    def refused(path, *rest, **options):
        if str(path).endswith(".so"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **options)

    load(source.parent, ["answer"])
    monkeypatch.setattr(os, "open", refused)
    assert load(source.parent, ["answer"]).answer() == 42


@pytest.mark.usefixtures("compiled")
def test_an_error_of_the_compiler_is_one_line(source):
    source.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(CannotCompile, match=r"fails: .*nothing") as caught:
        load(source.parent, ["answer"])
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
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: maps.encode() if str(self) == "/proc/self/maps" else read(self)
    )
    with pytest.raises(CannotCompile, match=re.escape(message)):
        load(source.parent, ["answer"])


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
        if path.startswith("/proc/self/fd/") == (refuses == "cache"):
            raise OSError("failed to map segment")
        return opened(path)

    monkeypatch.setattr(compiled.ctypes, "CDLL", cdll)
    for _ in range(2):
        assert load(source.parent, ["answer"]).answer() == 42
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
    assert load(source.parent, ["answer"]).answer() == 42
    (tmp_path / "bin" / "gcc").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(CannotCompile, match="cc fails: it does not say why; gcc fails: it does not say why"):
        load(source.parent, ["answer"])


def spoil(kept_file: Path, tmp_path: Path, how: str) -> None:
    """Put something that is not ours to load in the place of the library, or leave a way for others to."""
    folder = kept_file.parent
    if how == "writable by others":
        kept_file.chmod(0o622)
    elif how == "in a folder that others write":
        folder.chmod(0o777)
    elif how == "below a folder that others write":
        folder.parent.chmod(0o777)
    elif how == "a link":
        kept_file.rename(tmp_path / "elsewhere.so")
        kept_file.symlink_to(tmp_path / "elsewhere.so")
    elif how == "a second name":
        os.link(kept_file, tmp_path / "elsewhere.so")
    elif how == "in a linked folder":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "a pipe":
        kept_file.unlink()
        os.mkfifo(kept_file)
    elif how == "cut short with the right hash":
        half = kept_file.read_bytes()[:4096]
        kept_file.write_bytes(half + hashlib.sha256(half).digest())


WAYS = ["writable by others", "in a folder that others write", "below a folder that others write", "a link"]
WAYS += ["a second name", "in a linked folder", "a pipe", "cut short with the right hash"]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("how", WAYS)
def test_what_others_could_have_written_is_not_loaded(how, source, runs, tmp_path):
    load(source.parent, ["answer"])
    assert cache.find(kept(tmp_path)[1].name) is not None
    spoil(kept(tmp_path)[1], tmp_path, how)
    assert load(source.parent, ["answer"]).answer() == 42
    assert len(runs) == 4, "compiled anew"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("place", ["file", "folder", "above"])
def test_what_another_user_owns_is_not_loaded(place, source, runs, tmp_path, monkeypatch):
    """Owners are told by lstat and fstat; a test cannot be another user."""
    load(source.parent, ["answer"])
    folder, made = kept(tmp_path)
    theirs = {"file": made, "folder": folder, "above": folder.parent}[place].stat().st_ino

    def owned(function):
        def stat_of(what):
            about = function(what)
            changed = list(about)
            changed[stat.ST_UID] = 12345
            return os.stat_result(changed) if about.st_ino == theirs else about

        return stat_of

    for name in ("lstat", "fstat"):
        monkeypatch.setattr(os, name, owned(getattr(os, name)))
    assert cache.find(made.name) is None


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "command, why",
    [
        ("cc -fvisibility=hidden", "has no function answer"),
        ("cc -Danswer=question", "has no function answer"),
        ("cc -fsanitize=address", "ends the process that loads it|fails: "),
    ],
)
def test_an_odd_compiler_spoils_no_later_run(command, why, source, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", command)
    with pytest.raises(CannotCompile, match=why):
        load(source.parent, ["answer"])
    assert not kept(tmp_path)
    monkeypatch.delenv("CC")
    assert load(source.parent, ["answer"]).answer() == 42


@pytest.mark.usefixtures("compiled")
def test_the_command_belongs_to_the_key(source, tmp_path, monkeypatch):
    load(source.parent, ["answer"])
    monkeypatch.setenv("CC", "cc -O0")
    load(source.parent, ["answer"])
    assert len(kept(tmp_path)) == 3


@pytest.mark.usefixtures("compiled")
def test_two_libraries_of_the_cache_in_one_process(source):
    """Each is loaded from an open file, whose path must not be taken for that of the other."""
    answers = {}
    for number in (42, 43, 42, 43):
        source.write_text(SOURCE.replace("42", str(number)))
        answers.setdefault(number, []).append(load(source.parent, ["answer"]).answer())
    assert answers == {42: [42, 42], 43: [43, 43]}
