"""``ringkv plan`` at a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ringkv.apps.console import listed_endings, show
from ringkv.errors import size


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
    unknown = f" (of the configuration alone: {figures['endings_problem']})" if figures["endings_problem"] else ""
    show(
        f"{figures['model']}: budget {figures['budget']} + window {figures['window']} slots a KV head, policy "
        f"{figures['policy']}, lanes {figures['lanes']}, {figures['device']}",
        table,
        f"a text ends at: {listed_endings(figures['endings'])}{unknown}",
    )
    if figures["memory_bytes"] is not None:
        show(
            f"{size(figures['memory_bytes'])} {figures['memory_source']}: "
            f"this {'fits' if figures['fits'] else 'does not fit'}; "
            f"lanes that fit: {figures['most_lanes']}; largest budget for {figures['lanes']} "
            f"lane{'s' * (figures['lanes'] > 1)}: {figures['most_budget']}"
        )
