"""Everything that only a GPU can tell, in less than eight minutes: kernels, graph, speed against the floor, memory.

    python bench/gpu.py            # one GPU
    python bench/gpu.py --dry      # a CPU: the same code at tiny shapes on the torch path, an eager stub for the graph

Each section has a budget of seconds and a process of its own, so that one that fails or hangs loses no other. After
each its figures are printed as one line of JSON; the last line holds all. How to read them is in CONTRIBUTING.md.
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

START = 15.0  # of a section's seconds: those in which its process starts and ends


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS), help="these sections")
    parser.add_argument("--section", choices=list(SECTIONS), help="this one, here, its figures as they come")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what --section may take")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU is found; --dry runs on a CPU")
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
    """The figures of a section, as far as it came; ``error`` says what stopped it."""
    figures: dict[str, Any] = {}
    try:
        for figures in SECTIONS[name][0](DRY if dry else WET, time.monotonic() + seconds):
            if print_all:
                note(json.dumps({name: figures}))
    except Exception as error:  # whatever fails in a section, the others go on
        traceback.print_exc()
        figures = figures | {"error": f"{type(error).__name__}: {error}"}
        if print_all:
            note(json.dumps({name: figures}))
    return figures


def apart(name: str, command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The last figures that a process prints for a section; ``error`` says how it ended, if not well."""
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
    """What should hold, what was measured, and whether it is met: None where nothing was measured, or all was dry."""

    def rows(section: str, key: str = "rows") -> list[dict[str, Any]]:
        return result.get(section, {}).get(key, [])

    slow = [row["evicted"]["ratio"] for row in rows("decode", "steps") if "14B" in row["model"] and row["lanes"] == 16]
    shares = [row["share"] for row in rows("eviction") if row["policy"] != "rkv"]
    plans = [abs(row["ratio"] - 1) for row in rows("memory")]
    means = result.get("long", {}).get("mean_ms", [])
    found = [
        ("decode at 16 lanes of the 14B shape, x floor", max(slow, default=None), 1.25),
        ("eviction's share but for rkv", max(shares, default=None), 0.03),
        ("memory's distance from the plan", max(plans, default=None), 0.01),
        ("the last tenth of 10,000 steps, x the first", means[-1] / means[0] if len(means) == 10 else None, 1.05),
    ]
    dry = result["dry"]
    return [
        {"goal": what, "most": most, "measured": value, "met": None if dry or value is None else value <= most}
        for what, value, most in found
    ]


def tables(result: dict[str, Any]) -> str:
    """The figures that have a goal, for a reader."""
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
        head = ["model", "policy", "lanes", "all at once ms", "step ms", "share of decode"]
        rows = [
            [r["model"], r["policy"], str(r["lanes"]), f"{r['ms']:.3g}", f"{r['step_ms']:.3g}", f"{r['share']:.2%}"]
            for r in own
        ]
        parts += [table(head, rows)] * bool(rows)
    rows = [[r["goal"], str(r["measured"]), str(r["most"]), str(r["met"])] for r in result["goals"]]
    parts.append(table(["goal", "measured", "at most", "met"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
