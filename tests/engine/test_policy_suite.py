"""Every policy under every kind of model and prompt (CASES R1-R18), against the naive decoder.

The rows are a covering array: every pair of values of two factors occurs in one of them. A policy that is registered is
tested by adding its line to the table of ``naive.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from naive import POLICIES as NAIVE
from naive import Naive
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine.policies import POLICIES
from ringkv.engine.ring.evict import observe_due
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.storage import Ring
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
    rows: list[tuple[Any, ...]] = []
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
# A third factor matters here: a retained set with a gap that still has to be ranked down.
ROWS += [(10 * BUDGET, policy, "llama", 2, "refreekv:threshold=0.05", 0) for policy in EVICTING]


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tiny_engine(policy: str, *, family: str = "llama", kv_heads: int = 2, lanes: int = 2, **ring: Any) -> Engine:
    config = tiny_config(family, kv_heads=kv_heads)
    options = {"budget": BUDGET, "window": WINDOW, "retention": "all", **ring}
    return Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(policy=policy, **options), lanes=lanes)


def poison(ring: Ring) -> None:
    """Fill whatever is invisible with 1e4."""
    invisible = ring.position < 0
    for table in (ring.k, ring.v, ring.v_range):
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
        check_integrity(ring)
        assert ring.counts.max() <= ring.config.capacity
        tokens.append(int(logits.argmax()))
    return tokens


def test_the_table_is_covered():
    assert set(NAIVE) == set(EVICTING), "a policy needs its line in tests/helpers/naive.py"
    for (i, a), (j, b) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[i], row[j]) for row in ROWS} == set(itertools.product(a, b))


def clear_case(naive: Naive, length: int, **rules: Any) -> tuple[list[int], list[int], list[list[list[int]]]]:
    """A prompt, its tokens and live sets, no victim of which is told from a survivor by rounding alone."""
    equal = None
    for seed in range(1, 25):
        naive.closest = math.inf
        tokens, live = naive.run(prompt(length, seed), STEPS, **rules)
        if naive.closest > 1e-6:
            return prompt(length, seed), tokens, live
        if naive.closest == 0:  # for a reason, and then the older goes; or by rounding, as pooled scores may be
            equal = equal or (prompt(length, seed), tokens, live)
    if equal is not None:
        return equal
    raise AssertionError("every prompt has a near tie")


@pytest.mark.parametrize("length, policy, family, kv_heads, retention, pin", ROWS)
def test_against_the_naive_decoder(length, policy, family, kv_heads, retention, pin):
    """R1, R2, R7, R8, R11, R15 and R18: tokens and live sets, invisible slots poisoned, a neighbour running."""
    pin = min(pin, length)
    engine = tiny_engine(policy, family=family, kv_heads=kv_heads, retention=retention)
    config = engine.model.config
    threshold = None if retention == "all" else 0.05
    rules = {"budget": BUDGET, "window": WINDOW, "seed": 7, "pin": pin, "threshold": threshold}
    ids, tokens, live = clear_case(Naive(config, tiny_weights(config)), length, policy=policy, **rules)
    prefill(engine, 0, prompt(37), seed=1)
    poison(engine.ring)
    logits = prefill(engine, 1, ids, seed=7, pin=pin)
    check_integrity(engine.ring)
    assert engine.ring.counts[:, 1].min() >= 1
    assert engine.ring.counts.max() < CAPACITY
    assert engine.ring.evicted.max() == 0
    assert greedy(engine, logits, 1, STEPS, poisoned=True) == tokens
    assert live_sets(engine.ring, 1) == live
    assert engine.ring.evicted[:, 1].min() >= 2


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("tail", [1, 3, 40])
def test_prompt_or_fed_singly(policy, tail):
    """R3: without an eviction the live set and the logits do not depend on how the text came in."""
    ids, budget = prompt(60), {"budget": 64}
    whole, parts = (tiny_engine(policy, lanes=1, **budget) for _ in range(2))
    logits = prefill(whole, 0, ids, seed=1)
    other = prefill(parts, 0, ids[:-tail], seed=1)
    for token in ids[-tail:]:
        other = parts._runner.forward(torch.tensor([token]))[0]
    torch.testing.assert_close(logits, other, rtol=1e-9, atol=1e-9)
    assert live_sets(whole.ring, 0) == live_sets(parts.ring, 0) == [[list(range(60))] * 2] * 3
    if parts.ring.state:
        observe_due(parts.ring, parts.ring.unobserved > 0)
        for name, table in whole.ring.state.tensors().items():
            torch.testing.assert_close(table, parts.ring.state.tensors()[name], rtol=1e-5, atol=1e-6)


GREEDY = SamplingParams(temperature=0, max_tokens=60, seed=11, on_repetition="ignore")


@pytest.mark.parametrize("policy", EVICTING)
def test_a_lane_is_its_own(policy):
    """R14, R18: one request twice, after another, after an interrupt, in either lane beside any neighbour."""
    engine = tiny_engine(policy)
    first, second = prompt(40), prompt(100, seed=2)
    alone = engine.generate(first, GREEDY)
    sets = live_sets(engine.ring, 0)
    assert alone.ring["evictions"] > 5
    assert len(set(alone.token_ids)) > 5
    other = engine.generate(second, GREEDY)
    assert other.token_ids != alone.token_ids
    stream = engine.stream(second, GREEDY)
    for _ in range(20):
        next(stream)
    stream.close()
    assert engine.generate(first, GREEDY).token_ids == alone.token_ids
    assert live_sets(engine.ring, 0) == sets
    for lane, neighbours in ((1, [second, first]), (0, [first, prompt(7)]), (1, [prompt(33), first])):
        results = engine.generate(neighbours, GREEDY)
        assert results[lane].token_ids == alone.token_ids
        assert live_sets(engine.ring, lane) == sets


@pytest.mark.parametrize("policy", EVICTING)
def test_noise_is_the_seeds(policy):
    """Another seed gives other victims under a policy that draws, and the same under one that does not."""
    sets = []
    for seed in (11, 12):
        engine = tiny_engine(policy)
        engine.generate(prompt(100), GREEDY.replace(seed=seed))
        sets.append(live_sets(engine.ring, 0))
    assert (sets[0] != sets[1]) == (policy in ("random", "curdkv", "vase-attnv", "vase-dkv"))


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_and_counts(policy):
    """R13, R16: bytes follow from the sizes and stay; each budget keeps its number; a short run evicts nothing."""
    for budget in (24, 56):
        engine = tiny_engine(policy, budget=budget)
        ring, slots = engine.ring, 3 * 2 * 2 * (budget + WINDOW)
        tables = slots * (4 + 4 + 4) + 3 * 2 * 4 * WINDOW * 16 * 8 + 3 * 2 * (4 + 4) + 2 * (5 * 8 + 4 + 1)
        means = 3 * 2 * (4 * (16 + 8) * 4 + 8)
        state = {"h2o": slots * 4 + 3 * 2 * 8, "gkv": slots * 4, "triattention": means}.get(policy, 0)
        assert ring.nbytes == 2 * slots * 16 * 8 + tables + state
        before = {name: x.data_ptr() for name, x in ring.tensors().items()}
        short = engine.generate(prompt(10), GREEDY.replace(max_tokens=5))
        assert short.ring["evictions"] == 0
        assert short.ring["kept"] == 14
        if policy != "full":
            long = engine.generate(prompt(200), GREEDY)
            assert long.ring["evictions"] == 7
            assert budget <= long.ring["kept"] < budget + WINDOW
        assert {name: x.data_ptr() for name, x in ring.tensors().items()} == before


@pytest.mark.parametrize("policy", EVICTING)
def test_pinned_prompt(policy):
    """R15: the prompt's positions live to the end; one that leaves nothing to evict is refused with the numbers."""
    engine = tiny_engine(policy, pin="prompt")
    result = engine.generate(prompt(15), GREEDY)
    assert result.ring["evictions"] > 5
    for layer in live_sets(engine.ring, 0):
        for head in layer:
            assert head[:15] == list(range(15))
    with pytest.raises(
        RingkvError, match=r"pin = 'prompt': pinned tokens \(16\) \+ window \(8\) = 24 is not below budget"
    ):
        engine.generate(prompt(16), GREEDY)
