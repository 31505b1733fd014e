"""Measure what only a GPU can tell, in less than eight minutes: kernels, the captured step, speed, memory.

    python bench/gpu.py            # on one GPU
    python bench/gpu.py --dry      # on a CPU: the same code at tiny shapes, on the torch path, without a real graph

It needs torch, triton and the package, either installed or linked as ``ringkv`` into a folder on PYTHONPATH. Each
section runs in a process of its own with a limit of seconds, so that a section that fails or hangs does not lose the
others. After each section, its figures are printed as one line of JSON. Tables follow, and the last line holds
everything.

How to read the output:

goals
    What should hold, the value that was measured, and ``met``: true, false, or null where nothing was measured.
kernels
    How far a kernel is from its torch twin: in ulp of the largest number of a row, or as the share of entries that
    differ. The share must be 0.
graph
    Whether the captured step gives the tokens of the eager one. ``equal`` must be true.
decode
    ``ms`` is the median time between steps, which an eviction does not move. ``bytes`` is what a step must read, the
    weights and the slots; ``floor_ms`` is the time that takes at the measured bandwidth of a copy, and ``ratio`` is ms
    over floor_ms. The goal is a ratio of at most 1.25 for the shape of Qwen3-14B on 16 lanes, after many evictions.
long
    ``mean_ms`` is the mean time of a step in each tenth of 10,000 steps, evictions included. The tenths must be level.
eviction
    ``ms`` is one eviction of all layers and lanes at once, and ``staggered_ms`` the same lane by lane, as where lanes
    fill at different steps; that takes the most launches. ``share`` is what evictions add to the mean step. The goal
    is a share below 3% at a budget of 4,096 for all policies but rkv, which has its own table.
memory
    ``ratio`` is the peak of reading 4,096 tokens and decoding with evictions, the pool of the graph included, over the
    plan. The goal is a distance from 1 of at most 1%. ``workspaces`` is what the process held before, mostly for
    cuBLAS, which no plan counts.
prefill
    Time and extra memory of reading a long prompt. The memory must not grow with the square of its length.
transformers
    The same shapes in a plain loop over the static cache of transformers.

``left_out`` names what the seconds of a section did not suffice for. ``error`` says what stopped a section; the figures
that it had by then are beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from ringkv.bench.common import finish, note, table
from ringkv.bench.gpu_parts import DRY, WET
from ringkv.bench.gpu_sections import SECTIONS

START = 15.0  # seconds of a section that are left for its process to start and end


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="use tiny shapes on a CPU")
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS), help="run only these")
    parser.add_argument("--section", choices=list(SECTIONS), help="run this section in this process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time that --section may take")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry runs on a CPU")
    if options.section:
        sys.exit(0 if "error" not in here(options.section, options.dry, options.seconds, print_all=True) else 1)
    result: dict[str, Any] = {"bench": "gpu", "dry": options.dry}
    if not options.dry:
        properties = torch.cuda.get_device_properties(0)
        result |= {"gpu": properties.name, "cuda": torch.version.cuda}
    for name in options.only:
        seconds = SECTIONS[name][1]
        started = time.monotonic()
        if options.dry:
            figures = here(name, True, float(seconds))
        else:
            command = [sys.executable, __file__, "--section", name, "--seconds", str(seconds - START)]
            figures = apart(name, command, seconds)
        result[name] = figures | {"seconds": time.monotonic() - started}
        note(json.dumps({name: result[name]}))
    result["goals"] = goals(result)
    note(tables(result))
    finish(result)
    if options.dry and any("error" in result[name] for name in options.only):
        sys.exit(1)


def here(name: str, dry: bool, seconds: float, print_all: bool = False) -> dict[str, Any]:
    """Run a section in this process: its figures, and under ``error`` what stopped it, if anything did."""
    figures: dict[str, Any] = {}
    try:
        for figures in SECTIONS[name][0](DRY if dry else WET, time.monotonic() + seconds):
            if print_all:
                note(json.dumps({name: figures}))
    except Exception as error:  # one that fails must not end the others
        traceback.print_exc()
        figures = figures | {"error": f"{type(error).__name__}: {error}"}
        if print_all:
            note(json.dumps({name: figures}))
    return figures


def apart(name: str, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a command: the last figures that it prints for a section, and under ``error`` how it failed, if it did."""
    problem = None
    with tempfile.TemporaryFile("w+") as out:
        try:
            code = subprocess.run(command, stdout=out, timeout=seconds).returncode
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"stopped after {seconds:g} s"
        out.seek(0)
        lines = [line for line in out if line.startswith(f'{{"{name}":') and line.endswith("}\n")]
    figures: dict[str, Any] = json.loads(lines[-1])[name] if lines else {}
    return figures if problem is None or "error" in figures else figures | {"error": problem}


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What should hold, what was measured, and whether it is met: None if it was not measured, or in a dry run."""

    def rows(section: str, key: str = "rows") -> list[dict[str, Any]]:
        return result.get(section, {}).get(key, [])

    slow = [row["evicted"]["ratio"] for row in rows("decode", "steps") if "14B" in row["model"] and row["lanes"] == 16]
    shares = [row["share"] for row in rows("eviction") if row["policy"] != "rkv"]
    plans = [abs(row["ratio"] - 1) for row in rows("memory")]
    means = result.get("long", {}).get("mean_ms", [])
    found = [
        ("a step of the 14B shape on 16 lanes, over its floor", max(slow, default=None), 1.25),
        ("share of evictions, for all policies but rkv", max(shares, default=None), 0.03),
        ("distance of the memory from the plan", max(plans, default=None), 0.01),
        ("the last tenth of 10,000 steps, over the first", means[-1] / means[0] if len(means) == 10 else None, 1.05),
    ]
    dry = result["dry"]
    return [
        {"goal": what, "most": most, "measured": value, "met": None if dry or value is None else value <= most}
        for what, value, most in found
    ]


def tables(result: dict[str, Any]) -> str:
    """Markdown tables of the figures that have a goal."""
    parts = []
    if steps := result.get("decode", {}).get("steps"):
        head = ["model", "lanes", "budget", "fresh ms", "x floor", "evicted ms", "floor ms", "x floor"]
        rows = []
        for row in steps:
            fresh, evicted = row["fresh"], row["evicted"]
            figures = (fresh["ms"], fresh["ratio"], evicted["ms"], evicted["floor_ms"], evicted["ratio"])
            rows.append([row["model"], str(row["lanes"]), str(row["budget"]), *(f"{x:.3g}" for x in figures)])
        parts.append(table(head, rows))
    shares = result.get("eviction", {}).get("rows", [])
    for own in ([r for r in shares if r["policy"] != "rkv"], [r for r in shares if r["policy"] == "rkv"]):
        head = ["model", "policy", "lanes", "all at once ms", "lane by lane ms", "step ms", "share of decode"]
        times = ("ms", "staggered_ms", "step_ms")
        rows = [
            [r["model"], r["policy"], str(r["lanes"]), *(f"{r[name]:.3g}" for name in times), f"{r['share']:.2%}"]
            for r in own
        ]
        parts += [table(head, rows)] * bool(rows)
    rows = [[r["goal"], str(r["measured"]), str(r["most"]), str(r["met"])] for r in result["goals"]]
    parts.append(table(["goal", "measured", "at most", "met"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
