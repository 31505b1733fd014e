"""Writing files so that nothing is lost: whole or not at all, and an error that names the file."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ringkv.errors import RingkvError

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, there or not."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def beside(path: Path, ending: str) -> Path:
    """A file of ours next to the output."""
    return path.with_name(f"{path.name}.ringkv{ending}")


def write_whole(path: Path, data: bytes, field: str = "output") -> None:
    """Write a file so that at every moment it is either the old or the new one; a link to it stays one.

    Args:
        field: what errors call the file.

    Raises:
        RingkvError: it cannot be written, or is there and is no regular file.
    """
    target = Path(os.path.realpath(path))
    new = beside(target, ".tmp")
    with refusing(path, field):
        if target.exists() and not target.is_file():  # a device would be replaced by a file
            raise RingkvError.bad(field, str(path), "a regular file")
        try:
            fd = os.open(new, FLAGS | os.O_TRUNC, 0o666)
            try:
                write_all(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # not every system can sync a folder
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextmanager
def refusing(path: Path, field: str = "output") -> Generator[None, None, None]:
    """Turns an OSError into a RingkvError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            reason = f"there is no folder {str(path.parent)!r}"
        raise RingkvError(f"{field} = {str(path)!r}: {reason}") from error


def write_all(fd: int, data: bytes) -> int:
    """Write all of ``data``; returns how many bytes that were."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)
