"""What several commands draw on a terminal: the line and the table below an answer, the policies, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ringkv.engine import Completion


def stdout() -> Console:
    """For tables: as wide as the terminal, or wide enough where nobody's terminal says."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 160
    return console


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def fields_table(rows: Mapping[str, str]) -> Table:
    """A table of names and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


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
    table = fields_table(rows)
    for warning in done.warnings:
        table.add_row("warning", warning)
    Console(stderr=True, highlight=False, markup=False).print(table)


def print_policies(rows: list[dict[str, Any]]) -> None:
    """The table of policies on stdout."""
    table = Table("policy", "fields", "keeps", "source", box=None, pad_edge=False)
    for row in rows:
        fields = ", ".join(f"{name}={default}" for name, default in row["params"].items())
        table.add_row(row["name"], fields or "-", row["keeps"], row["source"])
    stdout().print(table)
