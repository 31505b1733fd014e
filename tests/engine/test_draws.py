"""Stochastic policies draw from the distribution they claim, by comparison with samplers that share no code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ringkv.engine.policies import Policy, Random, VaseAttnV
from ringkv.engine.policies.live import Live
from ringkv.engine.ring.evict import live_tokens
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.table import lowest
from rings import fill, make_ring

DRAWS, PAIRS, LIMIT = 20_000, 50, 4.5
CASE = {
    name.removeprefix("case0."): x
    for name, x in load_file(Path(__file__).parents[1] / "golden" / "eviction.safetensors").items()
    if name.startswith("case0.")
}
BUDGET, WINDOW = int(CASE["budget"]), int(CASE["window"])


def survivors(policy: Policy) -> np.ndarray:
    """bool [draws, c]: which candidates of the golden case's first head survive, by seed, sample and eviction."""
    q, k, v = (CASE[name][0] for name in "qkv")
    group = len(q) // len(k)
    ring = make_ring(policy, budget=BUDGET, window=WINDOW, heads=group, head_dim=k.shape[-1])
    fill(ring, 0, 0, q[:group], k[:1], v[:1], scramble=1)
    one = live_tokens(ring, [(0, 0)])
    many = torch.zeros(DRAWS, dtype=torch.int64)
    rows = torch.arange(DRAWS)
    live = replace(
        one,
        **{name: getattr(one, name).expand(DRAWS, -1, -1) for name in ("position", "v_range", "slot")},
        pairs=Pairs([*one.pairs] * DRAWS, torch.device("cpu")),
        last=many,
        layer=many,
        pin=many,
        seed=rows // 8 * 7919,
        sample=rows % 2,
        eviction=rows // 2 % 4,
    )
    victim = lowest(policy.priority(live), live.protected, WINDOW)
    assert (victim.sum(-1) == WINDOW).all()
    return (~victim[:, 0]).numpy()


def one_by_one(weights: np.ndarray, kept: int, rng: np.random.Generator, replacement: bool = False) -> np.ndarray:
    """bool [draws, c]: ``kept`` drawn one after another in proportion to the weights that are left."""
    left = np.tile(weights, (DRAWS, 1))
    drawn = np.zeros(left.shape, dtype=bool)
    rows = np.arange(DRAWS)
    for _ in range(kept):
        edges = left.cumsum(1)
        chosen = (edges <= rng.random((DRAWS, 1)) * edges[:, -1:]).sum(1)
        drawn[rows, chosen] = True
        if not replacement:
            left[rows, chosen] = 0
    return drawn


def worst_z(one: np.ndarray, other: np.ndarray, sampled: np.ndarray, rng: np.random.Generator) -> float:
    """Largest two-sample |z| of each candidate's survival, and of the joint survival of 50 random pairs."""
    pairs = np.array([rng.choice(sampled, 2, replace=False) for _ in range(PAIRS)])
    z = []
    for a, b in (
        (one[:, sampled], other[:, sampled]),
        (one[:, pairs].all(-1), other[:, pairs].all(-1)),
    ):
        p, r = a.mean(0), b.mean(0)
        pooled = (p + r) / 2
        z.append(np.abs(p - r) / np.sqrt(np.maximum(pooled * (1 - pooled), 0.5 / DRAWS) * 2 / DRAWS))
    return float(np.concatenate(z).max())


@pytest.fixture(scope="module")
def vase():
    """The policy's survivors, the golden weights in float64, and which candidates are sampled."""
    weights = CASE["vase_attnv_smooth.probs"][0, 0].double().numpy()
    return survivors(VaseAttnV()), weights, np.flatnonzero(weights)


def against(vase: tuple[np.ndarray, np.ndarray, np.ndarray], power: float = 1, replacement: bool = False) -> float:
    got, weights, sampled = vase
    rng = np.random.default_rng(4)
    kept = BUDGET - WINDOW - (len(weights) - len(sampled))
    return worst_z(got, one_by_one(weights**power, kept, rng, replacement), sampled, rng)


def test_vase_attnv_protects(vase):
    got, weights, sampled = vase
    assert len(sampled) == 72
    assert got[:, weights == 0].all()
    assert 0 < got[:, sampled].mean(0).min() < got[:, sampled].mean(0).max() < 1


def test_vase_attnv(vase):
    assert against(vase) < LIMIT


def test_the_check_tells_other_samplers(vase):
    assert against(vase, replacement=True) > 3 * LIMIT
    assert against(vase, power=2) > 3 * LIMIT
    assert against(vase, power=1.1) > LIMIT


def test_random():
    got, rng = survivors(Random()), np.random.default_rng(5)
    sampled = np.arange(4, BUDGET)  # the sinks apart
    even = np.ones(BUDGET)
    even[:4] = 0
    kept = BUDGET - WINDOW - 4
    assert got[:, :4].all()
    assert worst_z(got, one_by_one(even, kept, rng), sampled, rng) < LIMIT
    assert worst_z(got, one_by_one(even, kept, rng, replacement=True), sampled, rng) > 3 * LIMIT
    assert worst_z(got, one_by_one(even * np.linspace(1, 2, BUDGET), kept, rng), sampled, rng) > 3 * LIMIT


def test_uniform_weights_give_uniform_victims(monkeypatch):
    """R10: equal weights make vase-attnv the uniform sampler on what is not protected."""
    monkeypatch.setattr(Live, "attention", lambda self: torch.full((DRAWS, 4, BUDGET), 1 / BUDGET))
    got, rng = survivors(VaseAttnV(large=0, kernel=1)), np.random.default_rng(6)
    even = np.ones(BUDGET)
    even[:4] = 0
    assert worst_z(got, one_by_one(even, BUDGET - WINDOW - 4, rng), np.arange(4, BUDGET), rng) < LIMIT


def test_draws_are_apart():
    """Seed, sample, eviction, layer and head each give their own noise."""
    ring = make_ring("random", budget=BUDGET, window=WINDOW, heads=2, kv_heads=2, layers=2, lanes=4)
    for lane, (seed, sample, evictions) in enumerate([(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]):
        ring.reset(lane, seed, sample)
        ring.evictions[:, lane] = evictions
    ring.counts[:] = BUDGET + WINDOW
    ring.position[:] = ring.order
    rows = live_tokens(ring, [(layer, lane) for layer in range(2) for lane in range(4)]).uniform().flatten(0, 1)
    assert len(torch.unique(rows, dim=0)) == 16
    limit = LIMIT / BUDGET**0.5
    assert (torch.corrcoef(rows) - torch.eye(16)).abs().max() < limit
