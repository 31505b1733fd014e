"""The result file of a run: locked, written line by line, and whole after any kind of end."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringkv.apps.jobs.rows import OURS, parse_object
from ringkv.apps.process import visible_json
from ringkv.errors import RingkvError, naming
from ringkv.files import FLAGS, beside, refusing, replacing, write_all

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class UnwrittenError(Exception):
    """A result could not be written, and the file is as it was."""


class StdoutResults:
    """Results on stdout, flushed line by line. Nothing is there to resume."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a result."""
        sys.stdout.buffer.write(_line(record))
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Does nothing."""


class Results:
    """A file of results, which is created if it is not there, and locked as long as this lives.

    Args:
        path: nothing in it is changed yet.

    Raises:
        RingkvError: the file cannot be opened, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0  # of the lines that are results
        self._ended = True  # whether the last of them has its newline
        self._lock_file: Path | None = None
        self._fd = -1
        try:
            with refusing(path):
                self._open()
        except BaseException:
            self.close()
            raise

    @property
    def empty(self) -> bool:
        """Whether nothing is in the file, not even a piece of a line."""
        return os.fstat(self._fd).st_size == 0

    def read(self, note: Callable[[str, int, bool], None]) -> None:
        """Read all results that are there.

        Args:
            note: called with the row's key, the sample, and whether it failed, of each.

        Raises:
            RingkvError: a line is no result, or ``note`` refuses it.
        """
        for number, line in enumerate(self._lines(), 1):
            at = f"{self.path}: line {number}"
            self._ended = line.endswith(b"\n")
            if line.strip():
                try:
                    unit = _unit(parse_object(line))
                except RingkvError as error:
                    if not self._ended:
                        self._ended = True
                        return
                    raise RingkvError(f"{at} is no result of ringkv ({error}): choose another output") from error
                with naming(at):
                    note(*unit)
            self._size += len(line)

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
            UnwrittenError: it is not; the reason in words.
        """
        try:
            self._write(_line(record))
        except OSError as error:
            raise UnwrittenError(error.strerror) from error

    def drop_failed(self) -> None:
        """Take out the results with an error; at every moment the file is either the old or the new one."""
        with replacing(self.path) as fd:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX)  # before it has the name, so that no other run comes between
            size = 0
            for line in self._lines():
                if line.strip() and not _unit(parse_object(line))[2]:
                    size += write_all(fd, line)
            if fcntl is None:  # Windows replaces no open file
                self._close()
        self._close()
        self._fd, self._size = fd, size

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._close()
        if self._lock_file is not None:
            self._lock_file.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if fcntl is None:
            lock = beside(self.path, ".lock")
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                raise _busy(self.path, f"; if none does, delete {lock}") from None
            self._lock_file = lock
        while True:
            self._fd = os.open(self.path, FLAGS, 0o666)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise RingkvError.bad("output", str(self.path), "a regular file, or - for stdout")
            if fcntl is None:
                return
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(self.path) from None
            # Another run may have put a new file in its place since it was opened.
            if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                return
            self._close()

    def _lines(self) -> Iterator[bytes]:
        with refusing(self.path), open(self.path, "rb") as file:
            yield from file

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


def _line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON in UTF-8; half a surrogate pair is escaped, as JSON escapes it."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return visible_json(text).encode(errors="backslashreplace") + b"\n"


def _unit(record: Mapping[str, Any]) -> tuple[str, int, bool]:
    """The key of a record's row, its sample, and whether it failed.

    Raises:
        RingkvError: it is no result.
    """
    result = record.get(OURS)
    sample = result.get("sample") if isinstance(result, Mapping) else None
    if "id" not in record or not isinstance(result, Mapping) or not isinstance(sample, int):
        raise RingkvError(f"accepted is an object with id and {OURS}, and in that the sample")
    return str(record["id"]), sample, result.get("error") is not None


def _busy(path: Path, hint: str = "") -> RingkvError:
    return RingkvError(f"output = {str(path)!r}: another run writes it{hint}")
