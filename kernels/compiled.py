"""Compile C for the processor at hand and load it into this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from ringkv.kernels import cache

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


class CannotCompile(Exception):
    """Why nothing can be compiled here, in a line."""


def load(folder: Path, names: Iterable[str]) -> ctypes.CDLL:
    """The functions of the C files in a folder.

    The result is kept (see ``cache.py``) under a name that says for which source, compiler and processor it was made;
    where nothing can be kept it is compiled in every process.

    Args:
        names: functions that there must be.

    Raises:
        CannotCompile: no compiler, one that fails or makes something else, or no way to share torch's threads.
    """
    threads, reasons = _openmp(), []
    for compiler in _compilers():
        try:
            return _load(folder, compiler, threads, list(names))
        except CannotCompile as error:
            reasons.append(str(error))
    raise CannotCompile("; ".join(reasons))


def _load(folder: Path, compiler: list[str], threads: Path, names: list[str]) -> ctypes.CDLL:
    target = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])  # its version, and what the processor has
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.[ch]"))}
    made_for = (*texts.values(), target, str(threads), *names, *compiler, *FLAGS)
    kept = f"{hashlib.sha256(chr(0).join(made_for).encode()).hexdigest()[:20]}.so"
    with suppress(OSError):  # not to be executed from there
        if (library := _open_kept(kept)) is not None:
            return library
    try:
        with tempfile.TemporaryDirectory(prefix="ringkv-") as place:
            sources = {path: f"{place}/{path.stem}.o" for path in texts if path.suffix == ".c"}
            for path, part in sources.items():
                _run([*compiler, *FLAGS, "-c", str(path), "-o", part])
            made = Path(place, "whole.so")
            _run([*compiler, "-shared", *sources.values(), str(threads), "-lm", "-o", str(made)])
            try:
                _try_loading(made, threads, names)
                library = ctypes.CDLL(str(made))  # stays when the folder goes
                cache.keep(made, kept)
            except OSError:  # where temporary files are, nothing may be executed
                cache.keep(made, kept)
                if (library := _open_kept(kept)) is None:
                    raise
    except OSError as error:
        raise CannotCompile(f"what is compiled cannot be written or loaded: {error}") from error
    return library


def _open_kept(name: str) -> ctypes.CDLL | None:
    """The library of this name in the cache, loaded from the very file that was checked; None where there is none."""
    fd = cache.find(name)
    # The descriptor stays open: the loader takes two libraries of one path for the same.
    return None if fd is None else ctypes.CDLL(f"/proc/self/fd/{fd}")


def _try_loading(made: Path, threads: Path, names: list[str]) -> None:
    """Load a library in a process of its own first: one that was made for something else may end the process.

    Raises:
        OSError: it cannot be executed from where it lies.
        CannotCompile: it ends the process, or lacks a function.
    """
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)\n"
        "try: library = ctypes.CDLL(sys.argv[1])\n"
        "except OSError as error: print(error); sys.exit(3)\n"
        "print(next((name for name in sys.argv[3:] if not hasattr(library, name)), ''))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(made), str(threads), *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired as error:
        raise CannotCompile("what is compiled does not load within a minute") from error
    said = done.stdout.strip()
    if done.returncode == 3:
        raise OSError(said)
    if done.returncode:
        raise CannotCompile(f"what is compiled ends the process that loads it (exit code {done.returncode})")
    if said:
        raise CannotCompile(f"what is compiled has no function {said}")


def _compilers() -> list[list[str]]:
    """The command in CC, or what is found: the first may be one whose threads are not torch's."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CannotCompile(f"CC is no command: {error}") from error
    known = [named] if named else [["cc"], ["gcc"], ["clang"]]
    found = [command for command in known if shutil.which(command[0])]
    if not found:
        raise CannotCompile(f"CC names {named[0]}, which is not there" if named else "there is no cc, gcc or clang")
    return found


def _openmp() -> Path:
    """The OpenMP library that torch runs on. A second one would have threads of its own, and both would wait busily."""
    try:
        lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    except OSError as error:
        raise CannotCompile("only Linux says which OpenMP library torch runs on") from error
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    found = sorted(path for path in mapped if re.match(r"lib[gi]?omp\d?[-.]", path.name))
    beside_torch = [path for path in found if path.is_relative_to(Path(torch.__file__).parents[1])]
    one = beside_torch or found
    if len(one) != 1:
        raise CannotCompile(f"torch runs on one OpenMP library; found: {', '.join(map(str, one)) or 'none'}")
    return one[0]


def _run(command: list[str]) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it does not say why"]
        said = next((line for line in lines if "error:" in line), lines[-1])
        raise CannotCompile(f"{command[0]} fails: {said}")
    return done.stdout
