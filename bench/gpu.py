"""Everything that only a GPU can tell, in about eight minutes: kernels, graph, speed against the floor, memory.

    python bench/gpu.py            # one GPU
    python bench/gpu.py --dry      # a CPU: the same code at tiny shapes on the torch path, an eager stub for the graph

Each section has a budget of seconds and leaves out what it does not reach; after each the figures so far are printed as
one line of JSON, the last line holds all. How to read them is in CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringkv.bench.common import finish, note, table
from ringkv.bench.gpu_parts import (
    DRY,
    SAMPLED,
    WET,
    Setting,
    age,
    build,
    kernel_cases,
    make,
    transformers_step_ms,
)
from ringkv.engine.cost import step_bytes
from ringkv.engine.measure import Clock, copy_bandwidth, peak_bytes, reset_peak, run_steps
from ringkv.engine.plan import Planner
from ringkv.engine.runner import Runner
from ringkv.kernels.backend import use

POLICIES = ("vase-attnv", "vase-dkv", "snapkv", "rkv")


Section = Callable[[Setting, float], dict[str, Any]]  # gets the time at which it should be done


def kernels(setting: Setting, until: float) -> dict[str, Any]:
    """(a) Every operation through its kernel and through its twin, on the same input."""
    config = list(setting.models.values())[-1]
    rows: dict[str, Any] = {}
    for dtype in setting.dtypes:
        for name, case in kernel_cases(config, setting, dtype):
            if time.monotonic() > until:
                return rows | {"left_out": name}
            with use(setting.backend):
                kernel = case()
            with use("torch"):
                twin = case()
            rows[f"{name} {str(dtype).removeprefix('torch.')}"] = difference(kernel, twin)
    return rows


def difference(kernel: Tensor, twin: Tensor) -> dict[str, Any]:
    """How far apart two results are: in ulp of the row's largest number, or as the share of entries that differ."""
    if not kernel.is_floating_point():
        return {"differing": float((kernel != twin).double().mean())}
    wide, other = kernel.double(), twin.double()
    info = torch.finfo(kernel.dtype)
    largest = other.where(other.isfinite(), 0).abs().amax(-1, keepdim=True).clamp(min=info.tiny)
    apart = torch.where(wide == other, 0, (wide - other).abs() / (largest * info.eps))
    return {"ulp": float(apart.max())}


def graph(setting: Setting, until: float) -> dict[str, Any]:
    """(b) The captured step and the eager one: the same tokens, with evictions on the way."""
    config, budget = next(iter(setting.models.values())), min(setting.budgets)
    decoder = build(config, setting.device, torch.bfloat16)
    steps = 2 * setting.window + 10
    runs = []
    for captured in (False, True):
        runner = make(decoder, setting.ring(budget), max(setting.lanes), setting, captured)
        runs.append(generate(runner, budget + setting.window // 2, steps, setting))
    evictions = int(runner.ring.evicted.max())
    return {"tokens": sum(map(len, runs[0])), "evictions": evictions, "equal": runs[0] == runs[1]}


def generate(runner: Runner, prompt: int, steps: int, setting: Setting) -> list[list[int]]:
    """The tokens of some steps, all lanes."""
    with use(setting.backend):
        for lane in range(runner.ring.lanes):
            runner.ring.reset(lane, seed=lane)
            runner.sampler.set(lane, SAMPLED)
            ids = [(7 * lane + 3 * i) % runner.model.config.vocab_size for i in range(prompt)]
            runner.first(lane, runner.prefill(lane, ids))
        return run_steps(runner, steps)


def decode(setting: Setting, until: float) -> dict[str, Any]:
    """(c) Milliseconds a step against the floor, on a fresh ring and on one that was evicted many times."""
    bandwidth, rows = copy_bandwidth(setting.device, 1 << (20 if setting.dry else 32)), []
    left_out = []
    for name, config in setting.models.items():
        decoder = build(config, setting.device, torch.bfloat16)
        for lanes in setting.lanes:
            for budget in setting.budgets:
                if time.monotonic() > until:
                    left_out.append([name, lanes, budget])
                    continue
                runner = make(decoder, setting.ring(budget), lanes, setting)
                row: dict[str, Any] = {"model": name, "lanes": lanes, "budget": budget}
                for state, evictions in (("fresh", 0), ("evicted", setting.aged)):
                    age(runner, evictions, setting.backend)
                    slots = runner.ring.config.capacity if evictions else int(runner.ring.counts.max())
                    read = step_bytes(config, lanes, slots, decoder.dtype.itemsize)
                    ms, floor = step_times(runner, setting)["median"], 1e3 * read / bandwidth
                    row[state] = {"ms": ms, "bytes": read, "floor_ms": floor, "ratio": ms / floor}
                rows.append(row)
                del runner
        del decoder
    return {"bandwidth": bandwidth, "steps": rows, "left_out": left_out, "long": long_run(setting, until)}


def step_times(runner: Runner, setting: Setting, steps: int | None = None) -> dict[str, float]:
    """Milliseconds between steps, warm: the median, which an eviction in between does not move, and the mean."""
    clock = Clock(setting.device)
    with use(setting.backend):
        run_steps(runner, setting.warm)
        run_steps(runner, steps or setting.timed, clock)
    times = clock.between()
    return {"median": statistics.median(times), "mean": statistics.mean(times)}


def long_run(setting: Setting, until: float) -> dict[str, Any]:
    """One real run: is a step at its end as fast as after the first eviction?"""
    config = next(iter(setting.models.values()))
    runner = make(build(config, setting.device, torch.bfloat16), setting.ring(setting.budgets[0]), 1, setting)
    age(runner, 1, setting.backend)
    tenth = setting.long // 10
    means: list[float] = []
    while len(means) < 10 and time.monotonic() < until + 30:
        means.append(step_times(runner, setting, tenth)["mean"])
    seen, evictions = int(runner.ring.seen[0]), int(runner.ring.evicted.max())
    return {"steps": tenth * len(means), "seen": seen, "evictions": evictions, "mean_ms": means}


def eviction(setting: Setting, until: float) -> dict[str, Any]:
    """(d) What evicting every layer of every lane costs, as a share of the steps between two evictions."""
    rows: list[dict[str, Any]] = []
    for name, config in list(setting.models.items())[::2]:
        decoder = build(config, setting.device, torch.bfloat16)
        for policy in POLICIES:
            for lanes in setting.lanes:
                if time.monotonic() > until:
                    return {"rows": rows, "left_out": [name, policy, lanes]}
                runner = make(decoder, setting.ring(setting.budgets[0], policy), lanes, setting)
                step = step_times(age(runner, 2, setting.backend), setting)["median"]
                clock = Clock(setting.device)
                for _ in range(4):
                    age(runner, 1, setting.backend, clock)
                ms = statistics.median(clock.between()[::2])
                share = ms / (ms + setting.window * step)
                rows.append(
                    {"model": name, "policy": policy, "lanes": lanes, "ms": ms, "step_ms": step, "share": share}
                )
                del runner
        del decoder
    return {"rows": rows, "left_out": None}


def peers(setting: Setting, until: float) -> dict[str, Any]:
    """(e) The same shapes in a plain transformers loop over its static cache."""
    rows = []
    for name, config in setting.models.items():
        for lanes in setting.lanes:
            if time.monotonic() < until:
                length = setting.budgets[0] + setting.window
                rows.append({"model": name, "lanes": lanes} | transformers_step_ms(config, lanes, length, setting))
    return {"rows": rows}


def memory(setting: Setting, until: float) -> dict[str, Any]:
    """(f) Peak memory of decoding against the plan."""
    rows = []
    for name, config in setting.models.items():
        if time.monotonic() > until:
            break
        lanes, ring = max(setting.lanes), setting.ring(setting.budgets[0])
        plan = Planner(config, torch.bfloat16, prompt=8).plan(ring, lanes)
        before = _allocated(setting)
        decoder = build(config, setting.device, torch.bfloat16)
        runner = make(decoder, ring, lanes, setting)
        reset_peak(setting.device)
        step_times(age(runner, 2, setting.backend), setting)
        held = plan.weights_bytes + plan.ring_bytes + plan.scratch_bytes
        own = decoder.nbytes + runner.ring.nbytes + runner.ring.scratch.nbytes
        peak = own if setting.dry else (peak_bytes(setting.device) or 0) - before
        rows.append({"model": name, "plan": held, "held": own, "peak": peak, "ratio": peak / held})
        del runner, decoder
    return {"rows": rows}


def prefill(setting: Setting, until: float) -> dict[str, Any]:
    """(g) Reading a long prompt: it must not take n x n memory in either type."""
    config, rows = next(iter(setting.models.values())), []
    for dtype in setting.dtypes:
        if time.monotonic() > until:
            break
        decoder = build(config, setting.device, dtype)
        runner = make(decoder, setting.ring(setting.budgets[0]), 1, setting, captured=False)
        before = _allocated(setting)
        reset_peak(setting.device)
        clock = Clock(setting.device)
        ids = [i % config.vocab_size for i in range(setting.prompt)]
        with use(setting.backend):
            runner.ring.reset(0, seed=0)
            clock.mark()
            runner.prefill(0, ids)
            clock.mark()
        (ms,) = clock.between()
        extra = (peak_bytes(setting.device) or 0) - before
        named = {"dtype": str(dtype).removeprefix("torch."), "tokens": len(ids)}
        rows.append(named | {"ms": ms, "extra": extra})
        del runner, decoder
    return {"rows": rows}


def _allocated(setting: Setting) -> int:
    return 0 if setting.dry else torch.cuda.memory_allocated()


SECTIONS: list[tuple[str, Section, float]] = [
    ("kernels", kernels, 90),
    ("graph", graph, 30),
    ("decode", decode, 130),
    ("eviction", eviction, 60),
    ("prefill", prefill, 30),
    ("memory", memory, 40),
    ("transformers", peers, 60),
]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(name for name, *_ in SECTIONS)}")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU is found; --dry runs on a CPU")
    setting = DRY if options.dry else WET
    result: dict[str, Any] = {"bench": "gpu", "dry": options.dry}
    if not options.dry:
        result |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    for name, section, budget in SECTIONS:
        if options.only and name not in options.only:
            continue
        start = time.monotonic()
        try:
            figures = section(setting, start + budget)
        except Exception as error:
            if options.dry:
                raise
            # A machine is lent for minutes: what follows must still be measured.
            figures = {"error": f"{type(error).__name__}: {error}"}
        result[name] = figures | {"seconds": time.monotonic() - start}
        note(json.dumps({name: result[name]}))
    note(tables(result))
    finish(result)


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
    if shares := result.get("eviction", {}).get("rows"):
        head = ["model", "policy", "lanes", "eviction ms", "share of decode"]
        rows = [[r["model"], r["policy"], str(r["lanes"]), f"{r['ms']:.3g}", f"{r['share']:.2%}"] for r in shares]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
