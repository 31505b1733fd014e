"""Compile C for the processor at hand and load it into this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
HASH_BYTES = hashlib.sha256().digest_size


class CannotCompile(Exception):
    """Why nothing can be compiled here, in a line."""


def load(folder: Path) -> ctypes.CDLL:
    """The functions of the C files in a folder.

    The result is kept in the user's cache folder under a name that says for which source, compiler and processor it was
    made; where nothing can be kept it is compiled in every process.

    Raises:
        CannotCompile: no compiler, one that fails, or no way to share torch's threads.
    """
    threads, reasons = _openmp(), []
    for compiler in _compilers():
        try:
            return _load(folder, compiler, threads)
        except CannotCompile as error:
            reasons.append(str(error))
    raise CannotCompile("; ".join(reasons))


def _load(folder: Path, compiler: list[str], threads: Path) -> ctypes.CDLL:
    target = _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])  # its version, and what the processor has
    texts = {path: path.read_text() for path in sorted(folder.glob("*.[ch]"))}
    key = hashlib.sha256("\0".join((*texts.values(), target, str(threads), *FLAGS)).encode()).hexdigest()
    cache = _cache()
    kept = None if cache is None else cache / f"{key[:20]}.so"
    if kept is not None and _is_whole(kept):
        with suppress(OSError):  # not to be executed from there
            return ctypes.CDLL(str(kept))
    try:
        with tempfile.TemporaryDirectory(prefix="ringkv-") as place:
            sources = {path: f"{place}/{path.stem}.o" for path in texts if path.suffix == ".c"}
            for path, part in sources.items():
                _run([*compiler, *FLAGS, "-c", str(path), "-o", part])
            made = Path(place, "whole.so")
            _run([*compiler, "-shared", *sources.values(), str(threads), "-lm", "-o", str(made)])
            is_kept = kept is not None and _keep(made, kept)
            try:
                return ctypes.CDLL(str(made))  # stays when the folder goes
            except OSError:  # where temporary files are, nothing may be executed
                if not is_kept:
                    raise
                return ctypes.CDLL(str(kept))
    except OSError as error:
        raise CannotCompile(f"what is compiled cannot be written or loaded: {error}") from error


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
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise CannotCompile("only Linux says which OpenMP library torch runs on") from error
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines}
    found = sorted(path for path in mapped if re.match(r"lib[gi]?omp\d?[-.]", path.name))
    beside_torch = [path for path in found if path.is_relative_to(Path(torch.__file__).parents[1])]
    one = beside_torch or found
    if len(one) != 1:
        raise CannotCompile(f"torch runs on one OpenMP library; found: {', '.join(map(str, one)) or 'none'}")
    return one[0]


def _cache() -> Path | None:
    """The folder that keeps what is compiled; None for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "ringkv"
    except RuntimeError:
        return None


def _keep(made: Path, kept: Path) -> bool:
    """Copy it to the cache, where it appears in one piece, its hash at its end; whether the cache can be written."""
    try:
        data = made.read_bytes()
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            copy = Path(folder, kept.name)
            copy.write_bytes(data + hashlib.sha256(data).digest())
            os.replace(copy, kept)
    except OSError:
        return False
    return True


def _is_whole(kept: Path) -> bool:
    """Whether a file of the cache is there, and as it was written: to load a torn one can end the process."""
    try:
        data = kept.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-HASH_BYTES]).digest() == data[-HASH_BYTES:]


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
