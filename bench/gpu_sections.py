"""The sections of ``gpu.py``. Each yields all its figures so far whenever there are new ones."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringkv.apps.measure.bench import Clock, copy_bandwidth, peak_bytes, reset_peak, run_steps
from ringkv.bench.gpu_parts import SAMPLED, Setting, age, build, kernel_cases, make, transformers_step_ms
from ringkv.engine.cost import bytes_read
from ringkv.engine.live_bytes import LiveBytes
from ringkv.engine.memory import Planner
from ringkv.engine.runner import Runner
from ringkv.kernels.backend import use

POLICIES = ("vase-attnv", "vase-dkv", "snapkv", "rkv")

Figures = dict[str, Any]
Section = Callable[[Setting, float], Iterator[Figures]]  # the float is the time at which it should end


def kernels(setting: Setting, until: float) -> Iterator[Figures]:
    """Every operation through its kernel and through its twin, on the same input."""
    config = list(setting.models.values())[-1]
    rows: Figures = {}
    for dtype in setting.dtypes:
        for name, case in kernel_cases(config, setting, dtype):
            if time.monotonic() > until:
                yield rows | {"left_out": name}
                return
            with use(setting.backend):
                kernel = case()
            with use("torch"):
                twin = case()
            rows[f"{name} {str(dtype).removeprefix('torch.')}"] = difference(kernel, twin)
            yield rows


def difference(kernel: Tensor, twin: Tensor) -> Figures:
    """How far apart results are, in ulp of the row's largest number; for integers, the share of entries that differ."""
    if not kernel.is_floating_point():
        return {"differing": float((kernel != twin).double().mean())}
    wide, other = kernel.double(), twin.double()
    info = torch.finfo(kernel.dtype)
    largest = other.where(other.isfinite(), 0).abs().amax(-1, keepdim=True).clamp(min=info.tiny)
    apart = torch.where(wide == other, 0, (wide - other).abs() / (largest * info.eps))
    return {"ulp": float(apart.max())}


def graph(setting: Setting, until: float) -> Iterator[Figures]:
    """Whether the captured step and the eager one give the same tokens, over some evictions."""
    config, budget = next(iter(setting.models.values())), min(setting.budgets)
    decoder = build(config, setting.device, torch.bfloat16)
    steps = 2 * setting.window + 10
    runs = []
    for captured in (False, True):
        runner = make(decoder, setting.ring(budget), max(setting.lanes), setting, captured)
        runs.append(generate(runner, budget + setting.window // 2, steps, setting))
    evictions = int(runner.ring.evicted.max())
    yield {"tokens": sum(map(len, runs[0])), "evictions": evictions, "equal": runs[0] == runs[1]}


def generate(runner: Runner, prompt: int, steps: int, setting: Setting) -> list[list[int]]:
    """The tokens of some steps of all lanes."""
    with use(setting.backend):
        for lane in range(runner.ring.lanes):
            runner.ring.reset(lane, seed=lane)
            runner.sampler.set(lane, SAMPLED)
            ids = [(7 * lane + 3 * i) % runner.model.config.vocab_size for i in range(prompt)]
            runner.first(lane, runner.prefill(lane, ids))
        return run_steps(runner, steps)


def decode(setting: Setting, until: float) -> Iterator[Figures]:
    """Milliseconds a step against the floor, on a fresh ring and on one that has evicted many times.

    The largest model with the most lanes comes first, because it has the goal.
    """
    figures: Figures = {"bandwidth": copy_bandwidth(setting.device, 1 << (20 if setting.dry else 32))}
    figures |= {"steps": [], "left_out": []}
    for name, config in reversed(setting.models.items()):
        decoder = build(config, setting.device, torch.bfloat16)
        for lanes in reversed(setting.lanes):
            for budget in setting.budgets:
                if time.monotonic() > until:
                    figures["left_out"].append([name, lanes, budget])
                    continue
                runner = make(decoder, setting.ring(budget), lanes, setting)
                row: Figures = {"model": name, "lanes": lanes, "budget": budget}
                for state, evictions in (("fresh", 0), ("evicted", setting.aged)):
                    age(runner, evictions, setting.backend)
                    slots = runner.ring.config.capacity if evictions else int(runner.ring.counts.max())
                    read = bytes_read(decoder, lanes, lanes * config.layers * slots)
                    ms, floor = step_times(runner, setting)["median"], 1e3 * read / figures["bandwidth"]
                    row[state] = {"ms": ms, "bytes": read, "floor_ms": floor, "ratio": ms / floor}
                figures["steps"].append(row)
                yield figures
                del runner
        del decoder
    yield figures


def step_times(runner: Runner, setting: Setting, steps: int | None = None) -> dict[str, float]:
    """Milliseconds between warm steps: the median, which an occasional eviction does not move, and the mean."""
    clock = Clock(setting.device)
    with use(setting.backend):
        run_steps(runner, setting.warm)
        run_steps(runner, steps or setting.timed, clock)
    times = clock.between()
    return {"median": statistics.median(times), "mean": statistics.mean(times)}


def long(setting: Setting, until: float) -> Iterator[Figures]:
    """One long run: whether a step at its end is as fast as after the first eviction."""
    config = next(iter(setting.models.values()))
    runner = make(build(config, setting.device, torch.bfloat16), setting.ring(setting.budgets[0]), 1, setting)
    age(runner, 1, setting.backend)
    tenth = setting.long // 10
    means: list[float] = []
    while len(means) < 10 and time.monotonic() < until:
        means.append(step_times(runner, setting, tenth)["mean"])
        seen, evictions = int(runner.ring.seen[0]), int(runner.ring.evicted.max())
        yield {"steps": tenth * len(means), "seen": seen, "evictions": evictions, "mean_ms": means}


def eviction(setting: Setting, until: float) -> Iterator[Figures]:
    """The time to evict every layer of every lane, at once and lane by lane, and the share that the slower one adds.

    Most launches are made where each lane fills at a step of its own, and the fewest where all fill together.
    """
    figures: Figures = {"rows": [], "left_out": []}
    for name, config in list(setting.models.items())[::-2]:
        decoder = build(config, setting.device, torch.bfloat16)
        for lanes in reversed(setting.lanes):
            for policy in POLICIES:
                if time.monotonic() > until:
                    figures["left_out"].append([name, policy, lanes])
                    continue
                runner = make(decoder, setting.ring(setting.budgets[0], policy), lanes, setting)
                times = step_times(age(runner, 2, setting.backend), setting, 2 * setting.window)
                row: Figures = {"model": name, "policy": policy, "lanes": lanes}
                for key, staggered in (("ms", False), ("staggered_ms", True)):
                    clock = Clock(setting.device)
                    for _ in range(4):
                        age(runner, 1, setting.backend, clock, staggered)
                    row[key] = statistics.median(clock.between()[::2])
                added = max(times["mean"] - times["median"], row["staggered_ms"] / setting.window)
                row |= {"step_ms": times["median"], "share": added / (times["median"] + added)}
                figures["rows"].append(row)
                yield figures
                del runner
        del decoder
    yield figures


def peers(setting: Setting, until: float) -> Iterator[Figures]:
    """The same shapes in a plain loop over the static cache of transformers."""
    rows: list[Figures] = []
    for name, config in setting.models.items():
        for lanes in setting.lanes:
            if time.monotonic() < until:
                length = setting.budgets[0] + setting.window
                rows.append({"model": name, "lanes": lanes} | transformers_step_ms(config, lanes, length, setting))
                yield {"rows": rows}


def memory(setting: Setting, until: float) -> Iterator[Figures]:
    """Peak memory of reading a prompt and decoding with evictions, against the plan.

    The workspaces of cuBLAS belong to the process, one for each stream, and no plan counts them. A small model runs
    first, so that they exist before anything is measured.
    """
    rows: list[Figures] = []
    small = next(iter(setting.models.values()))
    read_and_step(
        make(build(small, setting.device, torch.bfloat16), setting.ring(min(setting.budgets)), 1, setting), 8, setting
    )
    for name, config in setting.models.items():
        if time.monotonic() > until:
            break
        lanes, ring = max(setting.lanes), setting.ring(setting.budgets[0])
        plan = Planner(config, torch.bfloat16, setting.plan_prompt, captured=True).plan(ring, lanes)
        gc.collect()
        before = allocated(setting)
        decoder = build(config, setting.device, torch.bfloat16)
        runner = make(decoder, ring, lanes, setting)
        age(runner, 2, setting.backend)
        held = decoder.nbytes + runner.ring.nbytes + runner.ring.scratch.nbytes
        held += runner.sampler.nbytes + runner.steering.nbytes
        reset_peak(setting.device)
        if setting.dry:
            with LiveBytes() as live:
                read_and_step(runner, setting.plan_prompt, setting)
            peak = held + live.peak
        else:
            read_and_step(runner, setting.plan_prompt, setting)
            peak = (peak_bytes(setting.device) or 0) - before + pools()
        rows.append({"model": name, "plan": plan.total_bytes, "held": held, "peak": peak})
        rows[-1] |= {"workspaces": before, "ratio": peak / plan.total_bytes}
        yield {"rows": rows}
        del runner, decoder


def read_and_step(runner: Runner, prompt: int, setting: Setting) -> None:
    """Read a prompt into the first lane, and step all lanes past their next eviction."""
    ids = [i % runner.model.config.vocab_size for i in range(prompt)]
    with use(setting.backend):
        runner.ring.reset(0, seed=0)
        runner.first(0, runner.prefill(0, ids))
        run_steps(runner, setting.window + 1)


def prefill(setting: Setting, until: float) -> Iterator[Figures]:
    """Time and memory of reading a long prompt of n tokens, which must not take n x n memory in either type."""
    config = next(iter(setting.models.values()))
    rows: list[Figures] = []
    for dtype in setting.dtypes:
        if time.monotonic() > until:
            break
        decoder = build(config, setting.device, dtype)
        runner = make(decoder, setting.ring(setting.budgets[0]), 1, setting, captured=False)
        ids = [i % config.vocab_size for i in range(setting.prompt)]
        with use(setting.backend):
            # The first time compiles kernels, and lets libraries choose theirs for this length.
            for _ in range(2):
                runner.ring.reset(0, seed=0)
                before, clock = allocated(setting), Clock(setting.device)
                reset_peak(setting.device)
                clock.mark()
                runner.prefill(0, ids)
                clock.mark()
        (ms,) = clock.between()
        extra = (peak_bytes(setting.device) or 0) - before
        named = {"dtype": str(dtype).removeprefix("torch."), "tokens": len(ids)}
        rows.append(named | {"ms": ms, "extra": extra})
        yield {"rows": rows}
        del runner, decoder


def allocated(setting: Setting) -> int:
    """Bytes of the live tensors on the GPU."""
    return 0 if setting.dry else torch.cuda.memory_allocated(setting.device)


def pools() -> int:
    """Bytes that the pools of captured graphs hold beyond the tensors that live in them."""
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in segments)


# The seconds that each section may take, the start of its process included; together less than eight minutes.
SECTIONS: dict[str, tuple[Section, int]] = {
    "kernels": (kernels, 80),
    "graph": (graph, 35),
    "decode": (decode, 125),
    "long": (long, 40),
    "eviction": (eviction, 65),
    "memory": (memory, 45),
    "prefill": (prefill, 35),
    "transformers": (peers, 55),
}
