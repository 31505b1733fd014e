"""What ``ringkv bench`` measures: prefill and decode of a ring, beside the least that memory allows."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ringkv.engine.config import RingConfig, check_count
from ringkv.engine.cost import slot_bytes, weight_bytes
from ringkv.engine.engine import Engine
from ringkv.errors import RingkvError

_BLOCK = 1 << 28  # bytes read to find the bandwidth: more than a cache holds


def read_bandwidth(device: torch.device, tries: int = 5) -> float:
    """Bytes a second that the device reads: the best of some sums over a tensor of 256 MiB."""
    block, best = torch.ones(_BLOCK // 4, device=device), 0.0
    for _ in range(tries):
        start = time.perf_counter()
        block.sum().item()
        best = max(best, _BLOCK / (time.perf_counter() - start))
    return best


def step_bytes(engine: Engine, lanes: int, slots: int) -> int:
    """Bytes that a step of the engine reads: each weight once, and ``slots`` keys and values a lane."""
    model = engine.model
    weights = weight_bytes(model.config, lanes, model.weight_dtype.itemsize)
    return weights + lanes * slots * slot_bytes(model.config, model.dtype.itemsize)


def decode(engine: Engine, prompt: Sequence[int], tokens: int) -> tuple[list[float], list[float]]:
    """Read a prompt into every lane and step them, greedily; seconds of each prefill, and of each step."""
    ring, runner = engine.ring, engine._runner
    with engine._exclusive(), engine._limits():
        try:
            prefills = []
            for lane in range(engine.lanes):
                start = time.perf_counter()
                ring.reset(lane, seed=lane)
                runner.first(lane, runner.prefill(lane, prompt))
                prefills.append(time.perf_counter() - start)
            steps = []
            for _ in range(tokens):
                start = time.perf_counter()
                runner.launch()
                runner.collect()
                steps.append(time.perf_counter() - start)
            return prefills, steps
        finally:
            for lane in list(ring.running):
                ring.stop(lane)


def bench(
    engine: Engine,
    budgets: Sequence[Any],
    lanes: Sequence[Any],
    policies: Sequence[str],
    *,
    prompt: int = 128,
    tokens: int = 96,
    window: int = 64,
) -> Iterator[dict[str, Any]]:
    """A row for each combination, as it is measured; all share the engine's decoder.

    Args:
        prompt, tokens: lengths of the prompt and of what is generated, in each lane.

    Raises:
        RingkvError: a value that is not accepted; nothing is measured then.
    """
    for field, value in (("prompt", prompt), ("tokens", tokens), *(("lanes", each) for each in lanes)):
        check_count(field, value)
        if value == "auto":
            raise RingkvError.bad(field, value, "an int >= 1")
    rings = [RingConfig(budget, window, policy) for budget in budgets for policy in policies]
    for ring in rings:
        if ring.capacity < prompt + tokens and not _evicts(ring):
            raise RingkvError(f"policy full holds {ring.capacity} tokens: prompt + tokens = {prompt + tokens}")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.model.config.vocab_size, (prompt,), generator=generator).tolist()
    bandwidth = read_bandwidth(engine.model.device)
    for ring in rings:
        for count in lanes:
            yield _row(engine, ring, count, ids, tokens, bandwidth)


def _row(
    engine: Engine, ring: RingConfig, lanes: int, ids: Sequence[int], tokens: int, bandwidth: float
) -> dict[str, Any]:
    with Engine(
        engine.model, ring=ring, lanes=lanes, backend=engine.backend, threads=engine.threads, name=engine.name
    ) as own:
        decode(own, ids[:8], 2)
        prefills, steps = decode(own, ids, tokens)
        # What attention reads at the end: up to the highest slot ever written.
        moved = step_bytes(own, lanes, int(own.ring.spans.max()))
        part = max(1, len(steps) // 4)
        late = statistics.median(steps[-part:])
        return {
            "budget": ring.budget,
            "window": ring.window,
            "policy": own.ring.policy.name,
            "lanes": lanes,
            "step_bytes": moved,
            "bandwidth_gb_s": bandwidth / 1e9,
            "floor_ms": moved / bandwidth * 1e3,
            "prefill_tok_s": len(ids) / statistics.median(prefills),
            "first_token_ms": prefills[0] * 1e3,
            "early_ms": statistics.median(steps[:part]) * 1e3,
            "late_ms": late * 1e3,
            "tok_s": lanes * tokens / sum(steps),
            "achieved_gb_s": moved / late / 1e9,
            "floor_share": moved / bandwidth / late,
            "evictions": int(own.ring.evicted.max()),
            "peak_bytes": _peak_bytes(own.model.device),
            "held_bytes": sum(own.plan().values()),
        }


def _peak_bytes(device: torch.device) -> int | None:
    """The most that was taken of the GPU's memory, or resident in this process so far; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _evicts(ring: RingConfig) -> bool:
    return not isinstance(ring.policy, str) and ring.policy.evicts
