"""Writing files so that nothing is lost: whole or not at all, and an error that names the file; and reading texts."""

from __future__ import annotations

import os
import stat
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


def missing_folder(path: Path) -> Path | None:
    """The folder that a file, or the file that a link leads to, would lie in; None where it is there."""
    for each in (path, Path(os.path.realpath(path))):
        if not each.parent.is_dir():
            return each.parent
    return None


def beside(path: Path, ending: str) -> Path:
    """A file of ours next to the output."""
    return path.with_name(f"{path.name}.ringkv{ending}")


def write_whole(path: Path, data: bytes, field: str = "output") -> None:
    """Write a file as a whole; see ``replacing``."""
    with replacing(path, field) as fd:
        write_all(fd, data)
    os.close(fd)


@contextmanager
def replacing(path: Path, field: str = "output", *, private: bool = False) -> Generator[int, None, None]:
    """A new file that takes the place of the old one when the block ends. At every moment it is one of the two.

    A link to the file stays a link, and the file's permissions stay.

    Args:
        field: what errors call the file.
        private: only its owner can read it, whatever the old one's permissions were.

    Yields:
        A descriptor to write to, which the caller closes after the block. It is closed already if the block fails.

    Raises:
        RingkvError: the file cannot be written, or is there and is no regular file.
    """
    target = Path(os.path.realpath(path))
    new = beside(target, ".tmp")
    with refusing(path, field):
        mode = None
        with suppress(FileNotFoundError):
            mode = target.stat().st_mode
        if mode is not None and not stat.S_ISREG(mode):  # a device would be replaced by a file
            raise RingkvError.bad(field, str(path), "a regular file")
        new.unlink(missing_ok=True)
        if private:
            mode = stat.S_IFREG | 0o600
        fd = os.open(new, FLAGS | os.O_EXCL, 0o666 if mode is None else stat.S_IMODE(mode))
        try:
            if mode is not None:
                with suppress(OSError):  # not every file system has permissions
                    os.chmod(new, stat.S_IMODE(mode))  # the umask took some of them away
            yield fd
            os.fsync(fd)
            os.replace(new, target)
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        with suppress(OSError):  # not every system can sync a folder
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def utf8_text(data: bytes) -> str:
    """The text that bytes in UTF-8 stand for: all of it, line ends as they are, without a byte order mark.

    Raises:
        UnicodeDecodeError: they are not UTF-8.
    """
    return data.decode("utf-8-sig")


@contextmanager
def refusing(path: Path, field: str = "output") -> Generator[None, None, None]:
    """Turns an OSError into a RingkvError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and (folder := missing_folder(path)) is not None:
            reason = f"there is no folder {str(folder)!r}"
        raise RingkvError(f"{field} = {str(path)!r}: {reason}") from error


def write_all(fd: int, data: bytes | memoryview) -> int:
    """Write all of ``data``; returns how many bytes that were."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)
