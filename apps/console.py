"""What several commands draw on a terminal: the line and the table below an answer, the policies, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ringkv.apps.process import note, say, visible_json
from ringkv.engine import Completion


def show(*parts: str | Table) -> None:
    """Texts and tables on stdout."""
    say(_drawn(parts))


def _drawn(parts: Iterable[str | Table], stderr: bool = False) -> str:
    """Texts and tables as stdout or stderr shows them: as wide as the terminal, or wide enough where no terminal says.

    No table is so narrow that a word or a number loses a part, whatever the terminal says. Nothing is coloured: the
    escape sequences in it would be those of the texts.
    """
    console = Console(stderr=stderr, color_system=None, highlight=False, markup=False, emoji=False)
    wide = console.width if console.is_terminal or "COLUMNS" in os.environ else 160
    with console.capture() as drawn:
        for part in parts:
            if isinstance(part, str):
                console.out(part, highlight=False)
            else:
                for column in part.columns:
                    words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
                    column.min_width = max(map(cell_len, words), default=0)
                console.width = 10**4  # to measure in
                console.width = max(wide, console.measure(part).minimum)
                console.print(part)
    return drawn.get()


def print_json(value: Any) -> None:
    """One line of JSON on stdout, in ASCII on a terminal that is not in Unicode."""
    text = json.dumps(value, ensure_ascii=not sys.stdout.encoding.lower().startswith("utf"))
    say(visible_json(text) + "\n")


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


def print_stats(done: Completion, endings: Mapping[int, str]) -> None:
    """The whole table on stderr.

    Args:
        endings: the ids that end a text, with their tokens' texts (see ``Prompts.endings``).
    """
    ring, timing = done.ring, done.timing
    retained = ring["retained"] or [0]
    ignored = done.sampling.get("ignore_eos", {}).get("value")
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
        "ends at": "no token (ignore_eos)" if ignored else listed_endings(endings),
        "seed": str(ring["seed"]),
    }
    table = fields_table(rows)
    for warning in done.warnings:
        table.add_row("warning", warning)
    note(_drawn([table], stderr=True).removesuffix("\n"))


def listed_endings(endings: Mapping[Any, str]) -> str:
    """The tokens that end a text, in a line."""
    return ", ".join(f"{id} {text}".rstrip() for id, text in endings.items()) or "no token"


def print_policies(rows: list[dict[str, Any]]) -> None:
    """The table of policies on stdout."""
    table = Table("policy", "fields", "keeps", "source", box=None, pad_edge=False)
    for row in rows:
        fields = ", ".join(f"{name}={default}" for name, default in row["params"].items())
        table.add_row(row["name"], fields or "-", row["keeps"], row["source"])
    show(table)
