"""``ringkv generate --input`` at a terminal: what a run depends on, its progress, its exit code."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ringkv.apps.ending import at_end
from ringkv.apps.jobs.checkpoints import Checkpoints
from ringkv.apps.jobs.job import Job, Status
from ringkv.apps.options import SAMPLING_FIELDS, Options, argument_text
from ringkv.apps.process import INTERRUPTED, note
from ringkv.engine import ModelConfig, SamplingParams, open_checkpoint, open_config, resolve_runtime
from ringkv.errors import RingkvError, check_int

# What tokens do not depend on, and what is recorded apart, with the seed.
_NOT_SETTINGS = ("seed", "stats", "quiet", "debug", "threads", *SAMPLING_FIELDS)


def run_file(
    options: Options,
    params: SamplingParams,
    input: str,
    output: str,
    *,
    lanes: Any,
    retry_errors: bool,
    every: Any = 0,
) -> int:
    """Generate from a file of prompts.

    Args:
        every: tokens between two snapshots of a row that runs; 0: none. stdout has none either.

    Returns:
        The exit code: 0, 1 where rows failed or results could not be written, 130 after an interrupt.

    Raises:
        RingkvError: a file or an option that is refused; nothing was generated.
    """
    check_int("--checkpoint-every", every, 0)
    if options.system is not None:
        raise RingkvError("--system: it goes with one prompt; in a file of prompts give rows with messages")
    for name, value in (("--budget", options.budget), ("--lanes", lanes)):
        if value == "auto":
            why = "with --input it would hang on the memory that is free when a run is resumed"
            raise RingkvError(f"{name} = 'auto': {why}; accepted is an int >= 1")
    settings = dataclasses.asdict(options) | {"model": argument_text(options.model), "lanes": lanes}
    for name in _NOT_SETTINGS:
        del settings[name]
    # What "auto" is here: a run that is resumed where the compiler or the GPU is gone would write other tokens.
    _, keys = open_config(options.model, revision=options.revision)
    runtime = resolve_runtime(ModelConfig.from_hf(keys), **options.given("device", "dtype", "backend"))
    settings["backend"] = runtime.backend

    def generation_config() -> Mapping[str, Any]:
        return open_checkpoint(options.model, revision=options.revision).generation_config

    with Job(input, output, params, settings, generation_config=generation_config, retry_errors=retry_errors) as job:
        if job.missing:
            with options.engine(lanes) as engine, progress(job.status, options.quiet) as on_result:
                kept = Checkpoints(Path(output), 0 if output == "-" else every, engine.load)
                status = job.run(functools.partial(engine.iterate, raw=options.raw), on_result, kept)
        else:
            status = job.status
    if not options.quiet or status.failed or status.interrupted or status.problem:
        note(summary(status, output))
    return INTERRUPTED if status.interrupted else 1 if status.failed or status.problem else 0


@contextmanager
def progress(status: Status, quiet: bool) -> Iterator[Callable[[Status], None] | None]:
    """A progress bar on stderr for a file of prompts; nothing where stderr is no terminal.

    Yields:
        What to call after each result, or None.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.completed}/{task.total} results"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=status.wanted, completed=status.done, figures="")
        started = time.monotonic()

        def on_result(now: Status) -> None:
            speed = now.tokens / max(1e-9, time.monotonic() - started)
            failed = f", {now.failed} failed" if now.failed else ""
            figures = f"{speed:.1f} tok/s, {now.evictions} evictions{failed}"
            bar.update(task, completed=now.done, figures=figures)

        at_end.append(console.show_cursor)
        try:
            yield on_result
        finally:
            at_end.remove(console.show_cursor)


def summary(status: Status, output: str) -> str:
    """One line: what is done, what failed, and how to go on."""
    line = f"[{status.done} of {status.wanted} results of {status.rows} rows, {status.failed} failed, "
    line += f"{status.tokens} tokens and {status.evictions} evictions in this run]"
    if status.warned:
        line += f"\nresults with warnings: {status.warned}; the first warning: {status.warning}"
    if status.unkept:
        line += f"\nwarning: {status.unkept}"
    if status.problem:
        line += f"\nringkv: {status.problem}"
    elif status.interrupted:
        line += "\ninterrupted" if output == "-" else f"\ninterrupted; the same command goes on from there ({output})"
    elif status.failed and output != "-":
        line += "\n--retry-errors generates the failed ones again"
    return line
