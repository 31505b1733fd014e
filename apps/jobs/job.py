"""Runs over files of prompts: each result is on the disk at once, and a run goes on where an earlier one ended."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.apps.jobs.results import Results, StdoutResults, Unit, UnwrittenError
from ringkv.apps.jobs.rows import OURS, Row, parse_object, read_rows
from ringkv.apps.process import handling_signals
from ringkv.engine import Completion, Sampling, SamplingParams, effective_seed
from ringkv.errors import RingkvError, naming
from ringkv.files import beside, same_file, write_whole

Iterate = Callable[[Sequence[Any], Sequence[SamplingParams]], Generator[tuple[int, Completion], None, None]]

_ABSENT = object()
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

    def count(self, result: Mapping[str, Any]) -> None:
        """Add a result of this run."""
        self.done += 1
        self.failed += result.get("error") is not None
        self.tokens += result.get("completion_tokens", 0)
        self.evictions += result.get("ring", {}).get("evictions", 0)
        if warnings := result.get("warnings"):
            self.warned += 1
            self.warning = self.warning or warnings[0]


class Job:
    """A file of prompts with its results, checked, locked and ready to run. A context manager.

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
        if "-" not in (source, output) and same_file(Path(source), Path(output)):
            raise RingkvError(f"output = {str(output)!r}: it is the input")
        self.rows = read_rows(source)
        self.params = params
        self.results = StdoutResults() if output == "-" else Results(Path(output))
        try:
            self.seed = self._agree(settings, generation_config, retry_errors)
        except BaseException:
            self.results.close()
            raise
        self._sampling: dict[str, SamplingParams] = {}
        self._errors: dict[str, dict[str, str]] = {}
        for row in self.rows:
            try:
                with naming(f"line {row.line}"):
                    self._sampling[row.key] = row.sampling(params, self.seed)
                    row.check_prompt()
            except RingkvError as error:
                self._errors[row.key] = {"type": type(error).__name__, "message": str(error)}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.results.close()

    @property
    def status(self) -> Status:
        """How far it is, before it runs."""
        done = self.results.done
        return Status(len(self.rows), sum(len(self._units(row)) for row in self.rows), len(done), sum(done.values()))

    @property
    def missing(self) -> list[Unit]:
        """(row id, sample) of what is not there yet, in the order of the rows."""
        return [unit for row in self.rows for unit in self._units(row) if unit not in self.results.done]

    def run(self, iterate: Iterate, on_result: Callable[[Status], None] | None = None) -> Status:
        """Generate what is missing. Ctrl-C and SIGTERM end it, but never within a line.

        Args:
            iterate: ``Engine.iterate``. A row of which some samples are there already is given to it whole, and those
                samples are left aside: each has its own noise, so the others come out the same.
            on_result: called after each result is written.

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
            with handling_signals(interrupt), closing(self._results(iterate)) as results:
                for row, result in results:
                    holding = True  # a signal waits for the end of the line
                    self.results.append({**row.carried, "id": row.id, OURS: result})
                    status.count(result)
                    holding = False
                    if came:
                        raise KeyboardInterrupt
                    if on_result is not None:
                        on_result(status)
        except KeyboardInterrupt:
            status.interrupted = True
        except UnwrittenError as error:
            status.problem = f"output: {error}: {status.done} results are kept, and the same command goes on from there"
        return status

    def _results(self, iterate: Iterate) -> Generator[tuple[Row, Mapping[str, Any]], None, None]:
        """What is missing, as it comes: first the rows that are refused here, last what the engine has left out."""
        missing = dict.fromkeys(self.missing)

        def rest(row: Row, error: Mapping[str, str]) -> Iterator[tuple[Row, Mapping[str, Any]]]:
            for unit in self._units(row):
                if unit in missing:
                    del missing[unit]
                    yield row, {"sample": unit[1], "error": error}

        for row in self.rows:
            if row.key in self._errors:
                yield from rest(row, self._errors[row.key])
        rows = [row for row in self.rows if any(unit in missing for unit in self._units(row))]
        if not rows:
            return
        errors = {}
        with closing(iterate([row.prompt for row in rows], [self._sampling[row.key] for row in rows])) as results:
            for index, completion in results:
                row = rows[index]
                unit = (row.key, completion.sample)
                if unit not in missing:
                    continue
                del missing[unit]
                if completion.error is not None:
                    errors[row.key] = completion.error
                    yield row, {"sample": completion.sample, "error": completion.error}
                elif completion.finish_reason != "cancelled":
                    yield row, completion.to_dict() | {"warnings": [*completion.warnings, *row.warnings]}
        # A prompt that is refused has one completion, whatever n is.
        for row in rows:
            yield from rest(row, errors.get(row.key, _NO_RESULT))

    def _units(self, row: Row) -> list[Unit]:
        """One a sample; one for a row whose params are refused."""
        n = self._sampling[row.key].n if row.key in self._sampling else 1
        return [(row.key, sample) for sample in range(n)]

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
        rows = {row.key: row.digest for row in self.rows}
        mine = json.loads(json.dumps({"settings": {**settings, "sampling": sampling}, "seed": seed, "rows": rows}))
        path = beside(results.path, ".json")
        if results.empty:
            write_whole(path, json.dumps(mine, indent=1).encode())
            return seed
        theirs = _read_settings(path, results.path)
        if given is None:
            mine["seed"] = theirs["seed"]
        _compare(theirs, mine, results)
        results.repair()
        if retry_errors:
            results.drop_failed()
        if mine != theirs:
            write_whole(path, json.dumps(mine, indent=1).encode())
        return int(mine["seed"])


def _read_settings(path: Path, output: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RingkvError(f"output = {str(output)!r}: it is not empty, and {path.name} is not beside it")
    with naming(str(path)):
        theirs = parse_object(path.read_bytes())
        kinds = {"settings": dict, "seed": int, "rows": dict}
        if theirs.keys() != kinds.keys() or not all(isinstance(theirs[name], kind) for name, kind in kinds.items()):
            raise RingkvError("it is not the settings of a run")
    return theirs


def _compare(theirs: Mapping[str, Any], mine: Mapping[str, Any], results: Results) -> None:
    """Refuse to go on with another run's results."""
    with naming(f"output = {str(results.path)!r}"):
        then, now = ({**run["settings"], "seed": run["seed"]} for run in (theirs, mine))
        if then != now:
            raise RingkvError(f"{_difference(then, now)}: resume with the same, or choose another")
        for key, digest in theirs["rows"].items():
            if mine["rows"].get(key) != digest:
                what = "has changed" if key in mine["rows"] else "is not in the input any more"
                raise RingkvError(f"row {key!r} {what} since these results were begun: choose another output")
        for key, sample in results.done:
            if key not in theirs["rows"]:
                raise RingkvError(f"it holds sample {sample} of row {key!r}, which is not in the input")


def _difference(then: Any, now: Any, name: str = "") -> str:
    """The first setting that differs, by its dotted name, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in [*now, *then] if then.get(key, _ABSENT) != now.get(key, _ABSENT))
        return _difference(then.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}" if name else key)
    before, after = ("absent" if value is _ABSENT else json.dumps(value) for value in (then, now))
    return f"{name} was {before}, now it is {after}"
