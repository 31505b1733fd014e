"""Snapshots of the rows that run, beside the results: a run that is killed goes on inside its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ringkv.engine import SamplingParams, Snapshot
from ringkv.errors import RingkvError
from ringkv.files import beside


class Checkpoints:
    """A folder ``<output>.ringkv.states`` with a file for each sample that runs; a sample that ends takes it away.

    Args:
        output: of the results.
        every: tokens of a sample between two of its snapshots; 0: none are written, and none are looked for.
        load: reads a snapshot of the engine that runs; see ``Engine.load``.

    Attributes:
        problem: in one line, what kept the first snapshot from being written or read; the run goes on without it.
    """

    def __init__(self, output: Path, every: int, load: Callable[[Path], Snapshot]) -> None:
        self.every, self._folder, self._load = every, beside(output, ".states"), load
        self.problem: str | None = None

    def find(self, key: str, sample: int, params: SamplingParams) -> Snapshot | None:
        """What an earlier run has left of a sample of the row with this key; None where there is nothing to use."""
        path = self._path(key, sample)
        if not self.every or not path.is_file():
            return None
        try:
            snapshot = self._load(path)
            if snapshot.params != params or snapshot.sample != sample:
                raise RingkvError(f"snapshot {str(path)!r}: it is of other params")
        except RingkvError as error:
            self._note(f"{error}; this row begins anew")
            return None
        return snapshot

    def keep(self, key: str, snapshot: Snapshot) -> None:
        """Write a snapshot in the place of the last one."""
        try:
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            snapshot.save(self._path(key, snapshot.sample), "checkpoint")
        except RingkvError as error:
            self._note(str(error))
        except OSError as error:
            self._note(f"checkpoint = {str(self._folder)!r}: {error.strerror}")

    def drop(self, key: str, sample: int) -> None:
        """Take away that of a sample whose result is there."""
        with suppress(OSError):
            self._path(key, sample).unlink(missing_ok=True)

    def close(self, complete: bool) -> None:
        """Take away the folder if nothing is in it; where every result is there, with what a killed run has left."""
        with suppress(OSError):
            for path in [*self._folder.glob("*.thought*")] if complete else ():
                path.unlink()
            self._folder.rmdir()

    def _path(self, key: str, sample: int) -> Path:
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        return self._folder / f"{digest}-{sample}.thought"

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem
