"""A folder that keeps compiled libraries between runs. Loading one runs it, so only files of our own are given out.

A file is ours if this user owns it, nobody else can write to it, and nobody else can put another one in its place: that
is asked of the open file, and of every folder on the way to it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

HASH_BYTES = hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find(name: str) -> int | None:
    """A descriptor of the file of this name, open for reading; None where it is missing, torn, or not ours."""
    if (folder := _folder()) is None or not _is_ours(folder):
        return None
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        about = os.fstat(fd)
        own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_nlink == 1
        if own and not about.st_mode & _OTHERS_WRITE and _is_whole(fd, about.st_size):
            return fd
    os.close(fd)
    return None


def keep(made: Path, name: str) -> None:
    """Copy a library to the cache, where it appears in one piece with its hash at its end; nothing where it cannot."""
    if (folder := _folder()) is None:
        return
    with suppress(OSError):
        data = made.read_bytes()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(folder):
            return
        with tempfile.TemporaryDirectory(dir=folder) as place:
            copy = Path(place, name)
            copy.write_bytes(data + hashlib.sha256(data).digest())
            copy.chmod(0o600)
            os.replace(copy, folder / name)


def _folder() -> Path | None:
    """Where the cache belongs; None for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(os.path.realpath(base), "ringkv")


def _is_ours(folder: Path) -> bool:
    """Whether nobody but this user and root can change what lies in a folder, or what its path leads to."""
    trusted = {os.geteuid(), 0}
    try:
        for each in (folder, *folder.parents):
            about = os.lstat(each)
            shared = about.st_mode & _OTHERS_WRITE
            # In a folder such as /tmp others can add files, but they cannot replace ours.
            if each != folder and about.st_mode & stat.S_ISVTX:
                shared = 0
            if not stat.S_ISDIR(about.st_mode) or about.st_uid not in trusted or shared:
                return False
    except OSError:
        return False
    return True


def _is_whole(fd: int, size: int) -> bool:
    """Whether a file holds what was written: its hash at its end, and an ELF library up to there.

    To load a library that is shorter than its header says ends the process.
    """
    with open(fd, "rb", closefd=False) as file:
        data = file.read(size)
    library = data[:-HASH_BYTES]
    if hashlib.sha256(library).digest() != data[-HASH_BYTES:] or len(library) < 64 or library[:5] != b"\x7fELF\x02":
        return False
    (sections,) = struct.unpack_from("<Q", library, 40)
    each, count = struct.unpack_from("<HH", library, 58)
    return bool(sections) and sections + each * count <= len(library)
