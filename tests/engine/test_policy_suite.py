"""Every policy under every kind of model and prompt (CASES R1-R18), against the naive decoder.

The rows are a covering array: every pair of values of two factors occurs in one of them. A policy that is registered is
tested by adding its line to the table of ``naive.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from naive import POLICIES as NAIVE
from naive import Naive
from ringkv import Engine, RingConfig
from ringkv.engine.policies import POLICIES
from ringkv.engine.ring import Ring
from rings import positions
from tiny import tiny_config, tiny_decoder, tiny_weights

BUDGET, WINDOW = 24, 8
CAPACITY = BUDGET + WINDOW
STEPS = 41  # five evictions at least
EVICTING = [name for name, cls in POLICIES.items() if cls.evicts]
FACTORS: dict[str, Sequence[Any]] = {
    "length": (1, 2, 3, BUDGET - 1, BUDGET, BUDGET + 1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * BUDGET, 10 * BUDGET),
    "policy": EVICTING,
    "family": ("llama", "qwen2", "qwen3"),
    "kv_heads": (4, 2, 1),
    "retention": ("all", "refreekv:threshold=0.05"),
    "pin": (0, 10),
}


def pairwise(factors: dict[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows in which every pair of values of two factors occurs; greedy, the same every time."""
    names = range(len(factors))
    values = list(factors.values())
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in values[a] for y in values[b]}
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=lambda pair: [(f, values[f].index(v)) for f, v in pair])
        row = {a: x, b: y}
        for f in names:
            if f not in row:
                gain = [sum(tuple(sorted([(f, v), each])) in missing for each in row.items()) for v in values[f]]
                row[f] = values[f][max(range(len(gain)), key=lambda i: (gain[i], (len(rows) + i) % len(gain)))]
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(row[f] for f in names))
    return rows


ROWS = pairwise(FACTORS)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tiny_engine(policy: str, *, family: str = "llama", kv_heads: int = 2, lanes: int = 2, **ring: Any) -> Engine:
    config = tiny_config(family, kv_heads=kv_heads)
    options = {"budget": BUDGET, "window": WINDOW, "retention": "all", **ring}
    return Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(policy=policy, **options), lanes=lanes)


def poison(ring: Ring) -> None:
    """Fill whatever is invisible with 1e4."""
    invisible = ring.position < 0
    for table in (ring.k, ring.v, ring.v_range, *ring.state.slots.values()):
        table[invisible] = 1e4


def prefill(engine: Engine, lane: int, ids: list[int], seed: int, pin: int = 0) -> Tensor:
    engine.ring.reset(lane, seed, pin=pin)
    return engine._runner.prefill(lane, ids)[0]


def live_sets(ring: Ring, lane: int) -> list[list[list[int]]]:
    return [positions(ring, layer, lane) for layer in range(ring.layers)]


def greedy(engine: Engine, logits: Tensor, lane: int, steps: int, poisoned: bool = False) -> list[int]:
    """Tokens of one lane, all running lanes stepping along on the same tokens."""
    ring, tokens = engine.ring, [int(logits.argmax())]
    for _ in range(steps - 1):
        if poisoned:
            poison(ring)
        logits = engine._runner.forward(torch.full((ring.lanes,), tokens[-1]))[lane]
        assert logits.isfinite().all()
        ring.check_integrity()
        assert ring.counts.max() <= ring.config.capacity
        tokens.append(int(logits.argmax()))
    return tokens


def test_the_table_is_covered():
    assert set(NAIVE) == set(EVICTING), "a policy needs its line in tests/helpers/naive.py"
    for (i, a), (j, b) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(a, b))


@pytest.mark.parametrize("length, policy, family, kv_heads, retention, pin", ROWS)
def test_against_the_naive_decoder(length, policy, family, kv_heads, retention, pin):
    """R1, R2, R7, R8, R11, R15 and R18: tokens and live sets, invisible slots poisoned, a neighbour running."""
    pin = min(pin, length)
    engine = tiny_engine(policy, family=family, kv_heads=kv_heads, retention=retention)
    prefill(engine, 0, prompt(37, seed=2), seed=1)
    poison(engine.ring)
    logits = prefill(engine, 1, prompt(length), seed=7, pin=pin)
    engine.ring.check_integrity()
    assert engine.ring.counts[:, 1].min() >= 1
    assert engine.ring.counts.max() < CAPACITY
    assert engine.ring.evicted.max() == 0
    tokens = greedy(engine, logits, 1, STEPS, poisoned=True)
    config = engine.model.config
    naive = Naive(config, tiny_weights(config))
    threshold = None if retention == "all" else 0.05
    rules = {"budget": BUDGET, "window": WINDOW, "seed": 7, "pin": pin, "threshold": threshold}
    want, live = naive.run(prompt(length), STEPS, policy=policy, **rules)
    print("CLOSEST", naive.closest)
    assert tokens == want
    assert live_sets(engine.ring, 1) == live
    assert engine.ring.evicted[:, 1].min() >= 2
