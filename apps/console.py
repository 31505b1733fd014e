"""What the command line draws: summaries, tables, progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ringkv.apps.jobs.job import Status
from ringkv.apps.trace.trace import Trace, spread
from ringkv.engine.completion import Completion
from ringkv.errors import size


def _stdout() -> Console:
    """For tables: as wide as the terminal, or wide enough where nobody's terminal says."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    return console


def summary(done: Completion) -> str:
    """One line: tokens, speed, ring, why it ended."""
    ring = done.ring
    evictions = f"{ring['evictions']} eviction{'s' * (ring['evictions'] != 1)}"
    line = (
        f"[{done.prompt_tokens} prompt + {done.completion_tokens} new tokens, {done.timing['tokens_per_s']:.1f} tok/s, "
        f"ring {ring['peak_slots']}/{ring['capacity']} slots, {evictions}, {_ended(done)}, seed {ring['seed']}]"
    )
    return "\n".join([line, *(f"warning: {warning}" for warning in done.warnings)])


def _ended(done: Completion) -> str:
    if done.error is not None:
        return f"error: {done.error['message']}"
    return {"length": "stopped at max_tokens", "stop": "ended", "cancelled": "interrupted"}.get(
        done.finish_reason, done.finish_reason
    )


def print_stats(done: Completion) -> None:
    """The whole table on stderr."""
    ring, timing = done.ring, done.timing
    retained = ring["retained"] or [0]
    rows = {
        "model": f"{done.model} ({done.dtype['compute']}, backend {done.backend})",
        "ended": _ended(done),
        "tokens": f"{done.prompt_tokens} prompt, {done.completion_tokens} new "
        f"({done.thinking_tokens} thinking, {done.answer_tokens} answer)",
        "speed": f"{timing['tokens_per_s']:.1f} tok/s; prefill {timing['prefill_s']:.2f} s, "
        f"decode {timing['decode_s']:.2f} s",
        "ring": f"budget {ring['budget']} + window {ring['window']} = {ring['capacity']} slots a KV head, "
        f"{ring['bytes'] / 2**20:.1f} MiB",
        "policy": " ".join([ring["policy"], *(f"{name}={value}" for name, value in ring["params"].items())]),
        "retention": f"{ring['retention']}; prompt tokens kept a layer: {min(retained)} to {max(retained)}",
        "seen, live": f"{ring['seen']} seen, {ring['kept']} live at the end, peak {ring['peak_slots']}",
        "evictions": str(ring["evictions"]),
        "sampling": ", ".join(
            f"{name} {entry['value']} ({entry['source']})"
            for name, entry in done.sampling.items()
            if entry["source"] != "default" or name in ("temperature", "top_p", "max_tokens")
        ),
        "seed": str(ring["seed"]),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    for warning in done.warnings:
        table.add_row("warning", warning)
    Console(stderr=True, highlight=False, markup=False).print(table)


def print_trace(trace: Trace) -> None:
    """A trace in a few lines."""
    layers, heads, seen = trace.taken.shape
    live, prompt, loop = trace.live(), trace.prompt_tokens, trace.loop()
    rows = {
        "model": trace.model,
        "policy": f"{trace.policy}; budget {trace.budget} + window {trace.window}, seed {trace.seed}",
        "text": f"{prompt} prompt tokens, {len(trace.texts) - prompt} new; {seen} read; ended: {trace.finish_reason}",
        "pairs": f"{layers} layers of {heads} KV heads",
        "evictions": f"{spread(trace.evictions)} a layer",
        "retention": f"{trace.retention}; {spread(trace.retained)} of {prompt} prompt tokens a layer",
        "held at the end": f"{live[..., :prompt].mean():.1%} of the prompt, {_share(live[..., prompt:])} of the answer",
        "tokens": f"{int(live.all((0, 1)).sum())} held by every pair, {seen - int(live.any((0, 1)).sum())} by none",
        "loop": "none" if loop is None else f"positions {loop[0]} to {loop[1] - 1}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    _stdout().print(table)


def _share(held: Any) -> str:
    return f"{held.mean():.1%}" if held.size else "nothing"


@contextmanager
def job_progress(status: Status, quiet: bool) -> Iterator[Callable[[Status], None] | None]:
    """A progress bar on stderr for a file of prompts; nothing where stderr is no terminal.

    Yields:
        What to call after each result, or None.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.completed}/{task.total} results"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=status.wanted, completed=status.done, figures="")
        started = time.monotonic()

        def on_result(now: Status) -> None:
            speed = now.tokens / max(1e-9, time.monotonic() - started)
            failed = f", {now.failed} failed" if now.failed else ""
            figures = f"{speed:.1f} tok/s, {now.evictions} evictions{failed}"
            progress.update(task, completed=now.done, figures=figures)

        yield on_result


def job_summary(status: Status, output: str) -> str:
    """One line: what is done, what failed, and how to go on."""
    line = f"[{status.done} of {status.wanted} results of {status.rows} rows, {status.failed} failed, "
    line += f"{status.tokens} tokens and {status.evictions} evictions in this run]"
    if status.problem:
        line += f"\nringkv: {status.problem}"
    elif status.interrupted:
        line += f"\ninterrupted; the same command goes on from there ({output})"
    elif status.failed:
        line += "\n--retry-errors generates the failed ones again"
    return line


def print_plan(figures: dict[str, Any]) -> None:
    """The arithmetic of an engine's memory on stdout."""
    table = Table("what", "shape", "type", "bytes", "", box=None, pad_edge=False)
    table.add_row("weights", figures["weights"], "", str(figures["weights_bytes"]), size(figures["weights_bytes"]))
    if figures["load_bytes"] > figures["weights_bytes"]:
        table.add_row("  loading", "while they are packed", "", str(figures["load_bytes"]), size(figures["load_bytes"]))
    for name, part in figures["tables"].items():
        table.add_row(f"  {name}", str(list(part["shape"])), part["dtype"], str(part["bytes"]), size(part["bytes"]))
    for name, what in (
        ("ring", "the sum of these"),
        ("scratch", "of evictions"),
        *[("step", "captured, at most")] * (figures["step_bytes"] > 0),
        ("prefill", f"at most, {figures['prompt_tokens']} tokens"),
        ("total", "at the worst moment"),
    ):
        table.add_row(name, what, "", str(figures[f"{name}_bytes"]), size(figures[f"{name}_bytes"]))
    for tokens, count in figures["full_cache_bytes"].items():
        table.add_row("full cache", f"{tokens} tokens", "", str(count), size(count))
    console = _stdout()
    console.print(
        f"{figures['model']}: budget {figures['budget']} + window {figures['window']} slots a KV head, policy "
        f"{figures['policy']}, lanes {figures['lanes']}, {figures['device']}"
    )
    console.print(table)
    if figures["memory_bytes"] is not None:
        console.print(
            f"{size(figures['memory_bytes'])} {figures['memory_source']}: "
            f"this {'fits' if figures['fits'] else 'does not fit'}; "
            f"lanes that fit: {figures['most_lanes']}; largest budget for {figures['lanes']} "
            f"lane{'s' * (figures['lanes'] > 1)}: {figures['most_budget']}"
        )


def print_cards(rows: list[dict[str, Any]]) -> None:
    """What a step must read and the least time of that, on stdout."""
    table = Table("policy", "budget", "lanes", "MB a step", "copy GB/s", "floor ms", box=None, pad_edge=False)
    for row in rows:
        cost = (row["step_bytes"] / 1e6, row["bandwidth_gb_s"], row["floor_ms"])
        table.add_row(*_which(row), *(f"{value:.1f}" for value in cost))
    _stdout().print(table)


def print_bench(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    """What was measured, on stdout."""
    speeds = ("prefill tok/s", "first ms", "early ms", "late ms", "tok/s")
    head = ("policy", "budget", "lanes", *speeds, "GB/s", "of floor", "evicted", "peak")
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        measured = (f"{row['achieved_gb_s']:.1f}", f"{row['floor_share']:.0%}", str(row["evictions"]))
        peak = "" if row["peak_bytes"] is None else size(row["peak_bytes"])
        table.add_row(*_which(row), *_speeds(row), *measured, peak)
    for row in peers:
        table.add_row(f"{row['peer']} {row['dtype']}", "", str(row["lanes"]), *_speeds(row))
    _stdout().print(table)


def _which(row: dict[str, Any]) -> tuple[str, ...]:
    return row["policy"], str(row["budget"]), str(row["lanes"])


def _speeds(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:.1f}" for name in ("prefill_tok_s", "first_token_ms", "early_ms", "late_ms", "tok_s")]


def print_policies(rows: list[dict[str, Any]]) -> None:
    """The table of policies on stdout."""
    table = Table("policy", "fields", "keeps", "source", box=None, pad_edge=False)
    for row in rows:
        fields = ", ".join(f"{name}={default}" for name, default in row["params"].items())
        table.add_row(row["name"], fields or "-", row["keeps"], row["source"])
    _stdout().print(table)
