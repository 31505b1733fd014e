"""The result file of a run: locked, written line by line, and whole after any kind of end."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ringkv.engine.rows import OURS, parse_object
from ringkv.errors import RingkvError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Unit = tuple[str, int]  # row id as a string, sample

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


class StdoutResults:
    """Results on stdout, flushed line by line. Nothing is there to resume."""

    def __init__(self) -> None:
        self.done: dict[Unit, bool] = {}

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a result."""
        sys.stdout.buffer.write(_line(record))
        sys.stdout.buffer.flush()
        unit, failed = _unit(record)
        self.done[unit] = failed

    def close(self) -> None:
        """Does nothing."""


class Results:
    """A file of results, which is created if it is not there, and locked as long as this lives.

    Args:
        path: read at once; nothing in it is changed yet.

    Attributes:
        done: (row id, sample) -> whether it failed, for every result in the file.

    Raises:
        RingkvError: the file cannot be opened, another run writes it, or a line is no result or is there twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Unit, bool] = {}
        self._size = 0  # of the lines that are results
        self._ended = True  # whether the last of them has its newline
        self._lock_file: Path | None = None
        self._fd = -1
        try:
            with refusing(path):
                self._fd = self._open()
                self._read()
        except BaseException:
            self.close()
            raise

    @property
    def empty(self) -> bool:
        """Whether nothing is in the file, not even a piece of a line."""
        return os.fstat(self._fd).st_size == 0

    def repair(self) -> None:
        """Cut off a torn last line; end one that lacks its newline only."""
        with refusing(self.path):
            os.ftruncate(self._fd, self._size)
            if not self._ended:
                self._write(b"\n")
                self._ended = True

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a result. It is on the disk when this returns.

        Raises:
            OSError: it is not, and the file is as it was.
        """
        self._write(_line(record))
        unit, failed = _unit(record)
        self.done[unit] = failed

    def drop_failed(self) -> None:
        """Take out the results with an error; at every moment the file is either the old or the new one."""
        if not any(self.done.values()):
            return
        new = beside(self.path, ".tmp")
        with refusing(new):
            new.unlink(missing_ok=True)
            fd = os.open(new, _FLAGS | os.O_EXCL, stat.S_IMODE(os.fstat(self._fd).st_mode))
            try:
                if fcntl is not None:
                    fcntl.flock(fd, fcntl.LOCK_EX)  # before it has the name, so that no other run comes between
                kept = 0
                for line in self._lines():
                    if line.strip() and not _unit(parse_object(line))[1]:
                        kept += _write_all(fd, line)
                os.fsync(fd)
                if fcntl is None:  # Windows replaces no open file
                    self._close()
                os.replace(new, self.path)
            except BaseException:
                os.close(fd)
                new.unlink(missing_ok=True)
                raise
        self._close()
        self._fd, self._size = fd, kept
        self.done = {unit: failed for unit, failed in self.done.items() if not failed}

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._close()
        if self._lock_file is not None:
            self._lock_file.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        if fcntl is None:
            lock = beside(self.path, ".lock")
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                raise _busy(self.path, f"; if none does, delete {lock}") from None
            self._lock_file = lock
        while True:
            fd = os.open(self.path, _FLAGS, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise RingkvError.bad("output", str(self.path), "a regular file, or - for stdout")
                if fcntl is None:
                    return fd
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another run may have put a new file in its place since it was opened.
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise _busy(self.path) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _lines(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            yield from file

    def _read(self) -> None:
        for number, line in enumerate(self._lines(), 1):
            at = f"{self.path}: line {number}"
            self._ended = line.endswith(b"\n")
            if line.strip():
                try:
                    unit, failed = _unit(parse_object(line))
                except RingkvError as error:
                    if not self._ended:
                        self._ended = True
                        return
                    raise RingkvError(f"{at} is no result of ringkv ({error}): choose another output") from error
                if unit in self.done:
                    raise RingkvError(f"{at}: sample {unit[1]} of row {unit[0]!r} is there twice")
                self.done[unit] = failed
            self._size += len(line)

    def _write(self, data: bytes) -> None:
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


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
            fd = os.open(new, _FLAGS | os.O_TRUNC, 0o666)
            try:
                _write_all(fd, data)
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


def _write_all(fd: int, data: bytes) -> int:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)


def _line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON in UTF-8; half a surrogate pair stays escaped."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def _unit(record: Mapping[str, Any]) -> tuple[Unit, bool]:
    """What a record is the result of, and whether it failed.

    Raises:
        RingkvError: it is no result.
    """
    result = record.get(OURS)
    sample = result.get("sample") if isinstance(result, Mapping) else None
    if "id" not in record or not isinstance(result, Mapping) or not isinstance(sample, int):
        raise RingkvError(f"accepted is an object with id and {OURS}, and in that the sample")
    return (str(record["id"]), sample), result.get("error") is not None


def _busy(path: Path, hint: str = "") -> RingkvError:
    return RingkvError(f"output = {str(path)!r}: another run writes it{hint}")
