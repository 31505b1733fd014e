"""Runs over files of prompts: each result is on the disk at once, and a run goes on where an earlier one ended."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, tee
from pathlib import Path
from typing import Any

import numpy as np

from ringkv.apps.jobs.checkpoints import Checkpoints
from ringkv.apps.jobs.results import Results, StdoutResults, UnwrittenError
from ringkv.apps.jobs.rows import OURS, Row, Rows
from ringkv.apps.jobs.settings import read_settings, write_settings
from ringkv.apps.process import handling_signals
from ringkv.engine import Completion, Sampling, SamplingParams, Snapshot, effective_seed
from ringkv.errors import MOST, RingkvError, naming
from ringkv.files import beside, same_file

Iterate = Callable[..., Generator[tuple[int, Completion], None, None]]

_ABSENT = object()
_MISSING, _DONE, _FAILED = range(3)  # what a result is
_NO_RESULT = {"type": "NoResult", "message": "the engine ended without a result for this sample"}


@dataclass
class Status:
    """How far a run is.

    Attributes:
        rows: in the input.
        wanted: results in all, one a sample.
        done: results that are there, those of earlier runs and the failed ones included.
        failed: of these, those with an error.
        tokens, evictions: of the results of this run.
        interrupted: whether Ctrl-C or SIGTERM ended it.
        problem: in one line, what kept a result from being written.
        warned: results of this run that have warnings.
        warning: the first of these.
        unkept: in one line, what kept a snapshot from being written or used; the results are as if it were not there.
    """

    rows: int
    wanted: int
    done: int
    failed: int
    tokens: int = 0
    evictions: int = 0
    interrupted: bool = False
    problem: str | None = None
    warned: int = 0
    warning: str = ""
    unkept: str | None = None

    def count(self, result: Mapping[str, Any]) -> None:
        """Add a result of this run."""
        self.done += 1
        self.failed += result.get("error") is not None
        self.tokens += result.get("completion_tokens", 0)
        self.evictions += result.get("ring", {}).get("evictions", 0)
        if warnings := result.get("warnings"):
            self.warned += 1
            self.warning = self.warning or warnings[0]


@dataclass
class _Begun:
    """A row whose results are coming.

    Attributes:
        left: the samples that have not come yet.
        error: what those come to that never do.
    """

    row: Row
    left: set[int]
    error: Mapping[str, str]

    def results(self, completion: Completion) -> Iterator[tuple[Row, Mapping[str, Any]]]:
        """What a completion gives: nothing where its sample was cancelled or is there already."""
        came = self.left & {completion.sample}
        if completion.error is not None:
            self.error = completion.error
            if not completion.prompt_tokens:  # the prompt was refused: one completion comes, whatever n is
                came = set(self.left)
        self.left -= came
        if completion.error is not None:
            yield from self.failures(came)
        elif came and completion.finish_reason != "cancelled":
            yield self.row, completion.to_dict() | {"warnings": [*completion.warnings, *self.row.warnings]}

    def failures(self, samples: Iterable[int]) -> Iterator[tuple[Row, Mapping[str, Any]]]:
        """Results with the error."""
        return ((self.row, {"sample": sample, "error": self.error}) for sample in sorted(samples))


class Job:
    """A file of prompts with its results, checked, locked and ready to run. A context manager.

    Every row is read once before anything runs, so that a file with a bad line is refused as a whole, and again when
    an engine asks for it. Between, 50 bytes are kept of it: where it lies, and hashes of its id and of itself.

    Beside the output lies ``<output>.ringkv.json``: the settings, the run's seed, a hash of each row. Where the output
    holds results already, the run resumes: settings and rows must be the same (more rows may follow), the seed is taken
    over, and what is missing is generated. A sample is done when its line is whole, failed or not.

    Args:
        source: JSON lines, or "-" for stdin.
        output: "-" is stdout: nothing is locked, kept beside it or resumed.
        params: for every row, but for what the row sets itself; the seed is the run's.
        settings: what else the tokens depend on (model, ring, dtype, backend, lanes, ...), by name, in JSON types.
        generation_config: gives the checkpoint's; it is asked where a new run's seed hangs on it.
        retry_errors: generate again what has an error.

    Raises:
        RingkvError: in one line, and no result was touched: a line that is no row, an output that another run writes
            or that has other settings (the first that differs is named), a missing folder, input = output.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        params: SamplingParams,
        settings: Mapping[str, Any],
        *,
        generation_config: Callable[[], Mapping[str, Any]] = dict,
        retry_errors: bool = False,
    ) -> None:
        _check_apart(source, output)
        self.params = params
        with ExitStack() as opened:
            self.rows = opened.enter_context(closing(Rows(source, self._samples)))
            if self.rows.first[-1] > MOST:
                raise RingkvError(f"{source}: it asks for {self.rows.first[-1]} results; accepted are {MOST} at most")
            self.results = StdoutResults() if output == "-" else Results(Path(output))
            opened.enter_context(closing(self.results))
            self._state = np.zeros(self.rows.first[-1], np.uint8)  # of each result that is wanted
            self._done = self._failed = 0
            self.seed = self._agree(settings, generation_config, retry_errors)
            self._opened = opened.pop_all()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def status(self) -> Status:
        """How far it is."""
        return Status(len(self.rows), len(self._state), self._done, self._failed)

    @property
    def missing(self) -> int:
        """How many results are not there yet."""
        return len(self._state) - self._done

    def run(
        self,
        iterate: Iterate,
        on_result: Callable[[Status], None] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> Status:
        """Generate what is missing. Ctrl-C and SIGTERM end it, but never within a line.

        Args:
            iterate: ``Engine.iterate``. A row of which some samples are there already is given to it whole, and those
                samples are left aside: each has its own noise, so the others come out the same.
            on_result: called after each result is written.
            checkpoints: where running rows are kept; ``iterate`` then takes ``every`` and ``on_snapshot``.

        Raises:
            OSError: stdout cannot be written, or its reader has left.
        """
        status, holding = self.status, False
        came: list[int] = []

        def interrupt(number: int, frame: Any) -> None:
            came.append(number)
            if not holding:
                raise KeyboardInterrupt

        try:
            with handling_signals(interrupt), closing(self._results(iterate, checkpoints)) as results:
                for row, result in results:
                    holding = True  # a signal waits for the end of the line
                    self.results.append({**row.carried, "id": row.id, OURS: result})
                    self._note(self.rows.place_of(row), result["sample"], result.get("error") is not None)
                    status.count(result)
                    if checkpoints is not None:
                        checkpoints.drop(row.key, result["sample"])
                    holding = False
                    if came:
                        raise KeyboardInterrupt
                    if on_result is not None:
                        on_result(status)
        except KeyboardInterrupt:
            status.interrupted = True
        except UnwrittenError as error:
            status.problem = f"output: {error}: {status.done} results are kept, and the same command goes on from there"
        if checkpoints is not None:
            checkpoints.close(complete=not self.missing)
            status.unkept = checkpoints.problem
        return status

    def _results(
        self, iterate: Iterate, checkpoints: Checkpoints | None
    ) -> Generator[tuple[Row, Mapping[str, Any]], None, None]:
        """What is missing, as it comes; last what the engine has left out."""
        todo = self._todo()
        for first in todo:
            if not isinstance(first[2], RingkvError):
                break
            yield from self._refused(first[0])
        else:
            return
        begun: dict[int, _Begun] = {}
        refused: deque[int] = deque()  # rows that came between those for the engine

        def given() -> Iterator[tuple[Any, SamplingParams | None]]:
            """Prompts with their params, as the engine asks for them; samples that were kept are prompts of their own,
            with the params that they have."""
            counted = count()
            for place, row, sampling in chain([first], todo):
                if isinstance(sampling, RingkvError):
                    refused.append(place)
                    continue
                left = set(self._missing(place))
                for sample in sorted(left):
                    snapshot = None if checkpoints is None else checkpoints.find(row.key, sample, sampling)
                    if snapshot is not None:
                        left.discard(sample)
                        begun[next(counted)] = _Begun(row, {sample}, _NO_RESULT)
                        yield snapshot, None
                if left:
                    begun[next(counted)] = _Begun(row, left, _NO_RESULT)
                    yield row.prompt, sampling

        def keep(index: int, snapshot: Snapshot) -> None:
            if checkpoints is not None and index in begun and snapshot.sample in begun[index].left:
                checkpoints.keep(begun[index].row.key, snapshot)

        if checkpoints is not None and checkpoints.every:
            iterate = partial(iterate, every=checkpoints.every, on_snapshot=keep)
        one, other = tee(given())
        with closing(iterate((prompt for prompt, _ in one), (sampling for _, sampling in other))) as results:
            for index, completion in results:
                while refused:
                    yield from self._refused(refused.popleft())
                if index in begun:
                    yield from begun[index].results(completion)
                    if not begun[index].left:
                        del begun[index]
        while refused:
            yield from self._refused(refused.popleft())
        for each in begun.values():
            yield from each.failures(each.left)

    def _todo(self) -> Iterator[tuple[int, Row, SamplingParams | RingkvError]]:
        """The rows of which a result is missing, each with its params or with why it is refused."""
        for place in range(len(self.rows)):
            if self._missing(place):
                row = self.rows[place]
                yield place, row, self._sampling(row)

    def _sampling(self, row: Row) -> SamplingParams | RingkvError:
        try:
            with naming(f"line {row.line}"):
                sampling = row.sampling(self.params, self.seed)
                row.check_prompt()
                return sampling
        except RingkvError as error:
            return error

    def _refused(self, place: int) -> Iterator[tuple[Row, Mapping[str, Any]]]:
        """The results of a row that no engine gets."""
        row, missing = self.rows[place], self._missing(place)
        error = self._sampling(row)
        return _Begun(row, set(missing), {"type": type(error).__name__, "message": str(error)}).failures(missing)

    def _missing(self, place: int) -> list[int]:
        """The samples of a row that are not there yet."""
        state = self._state[self.rows.first[place] : self.rows.first[place + 1]]
        return [] if state.all() else np.flatnonzero(state == _MISSING).tolist()

    def _samples(self, row: Row) -> int:
        """How many results a row shall have: one a sample, and one where its params are refused."""
        if self.params.n == 1 and not (isinstance(row.params, Mapping) and "n" in row.params):
            return 1  # either way
        try:
            return row.sampling(self.params, 0).n
        except RingkvError:
            return 1

    def _note(self, place: int, sample: int, failed: bool) -> None:
        """Take down that a result is there."""
        self._state[self.rows.first[place] + sample] = _FAILED if failed else _DONE
        self._done += 1
        self._failed += failed

    def _agree(
        self, settings: Mapping[str, Any], generation_config: Callable[[], Mapping[str, Any]], retry_errors: bool
    ) -> int:
        """Compare with what lies beside the output, mend the output, and return the run's seed."""
        given, results = self.params.seed, self.results
        drawn = given is None and (isinstance(results, StdoutResults) or results.empty)
        seed = effective_seed(given, None, 0, drawn and Sampling.resolve(self.params, generation_config()).greedy)
        if isinstance(results, StdoutResults):
            return seed
        sampling = {name: value for name, value in dataclasses.asdict(self.params).items() if name != "seed"}
        mine = json.loads(json.dumps({"settings": {**settings, "sampling": sampling}, "seed": seed}))
        path = beside(results.path, ".json")
        known = -1
        if not results.empty:
            known = self._compare(path, mine, results)
            results.repair()
            if retry_errors and self._failed:
                results.drop_failed()
                self._state[self._state == _FAILED] = _MISSING
                self._done, self._failed = self._done - self._failed, 0
        if known < len(self.rows):
            write_settings(path, mine, self.rows.entries)
        return int(mine["seed"])

    def _compare(self, path: Path, mine: dict[str, Any], results: Results) -> int:
        """Refuse to go on with another run's results; else take over its seed, and note what is done.

        Returns:
            How many rows that run had of this one's.
        """
        output = f"output = {str(results.path)!r}"
        if not path.is_file():
            raise RingkvError(f"{output}: it is not empty, and {path.name} is not beside it")
        theirs, digests = read_settings(path)
        if self.params.seed is None:
            mine["seed"] = theirs["seed"]
        then, now = ({**run["settings"], "seed": run["seed"]} for run in (theirs, mine))
        if then != now:
            raise RingkvError(f"{output}: {_difference(then, now)}: resume with the same, or choose another")
        known = np.zeros(len(self.rows), bool)
        for key, digest in digests:
            place = self.rows.place(key)
            if place is None or self.rows.digest(place) != digest:
                what = "is not in the input any more" if place is None else "has changed"
                raise RingkvError(f"{output}: row {key!r} {what} since these results were begun: choose another output")
            known[place] = True

        def note(key: str, sample: int, failed: bool) -> None:
            place = self.rows.place(key)
            first = self.rows.first
            if place is None or not known[place] or not 0 <= sample < first[place + 1] - first[place]:
                raise RingkvError(f"it holds sample {sample} of row {key!r}, which is not in the input")
            if self._state[first[place] + sample] != _MISSING:
                raise RingkvError(f"sample {sample} of row {key!r} is there twice")
            self._note(place, sample, failed)

        results.read(note)
        return int(known.sum())


def _check_apart(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Refuse an input that is the output, or a file that a run keeps beside it."""
    if "-" in (source, output):
        return
    path = Path(output)
    kept = [path, beside(path, ".json")]
    others = [beside(path, ".lock"), *(beside(Path(os.path.realpath(each)), ".tmp") for each in kept)]
    for each in (*kept, *others):
        if same_file(Path(source), each):
            what = "it is" if each == path else f"a run writes {each.name} beside it, which is"
            raise RingkvError(f"output = {str(output)!r}: {what} the input")


def _difference(then: Any, now: Any, name: str = "") -> str:
    """The first setting that differs, by its dotted name, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in [*now, *then] if then.get(key, _ABSENT) != now.get(key, _ABSENT))
        return _difference(then.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key)
    before, after = ("absent" if value is _ABSENT else json.dumps(value) for value in (then, now))
    return f"{name} was {before}, now it is {after}"
