"""The engine's step against the naive decoder: tokens and live sets, in float64."""

from __future__ import annotations

import pytest
import torch

from naive import Naive
from ringkv.engine.config import RingConfig
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from tiny import tiny_config, tiny_decoder, tiny_weights

CPU = torch.device("cpu")


def live_positions(ring: Ring, lane: int) -> list[list[list[int]]]:
    """Positions that are live, in position order, for every layer and head."""
    marks = ring.position[:, lane]
    return [[sorted(p for p in head if p >= 0) for head in layer] for layer in marks.tolist()]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("policy", ["streaming", "vase-attnv"])
@pytest.mark.parametrize(
    "retention, threshold", [("all", None), ("refreekv:threshold=0.05", 0.05), ("refreekv:threshold=0.9", 0.9)]
)
@pytest.mark.parametrize("prompt, pin", [(3, 0), (120, 0), (30, 12)])
def test_tokens_and_live_sets(family, policy, retention, threshold, prompt, pin):
    config = tiny_config(family)
    weights = tiny_weights(config)
    ids = torch.randint(97, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    ring = Ring(config, RingConfig(64, 8, policy, retention), 2, CPU, torch.float64)
    runner = Runner(tiny_decoder(config, weights), ring, Sampler(2, 97, CPU), Steering(2, None, CPU))
    lane = 1
    ring.reset(lane, seed=7, pin=pin)
    tokens = runner.first(lane, runner.prefill(lane, ids)).tokens
    for _ in range(299):
        tokens.append(runner.step().tokens[lane])
        check_integrity(ring)
    want, live = Naive(config, weights).run(
        ids, 300, policy=policy, budget=64, window=8, seed=7, pin=pin, threshold=threshold
    )
    assert tokens == want
    assert live_positions(ring, lane) == live
    assert ring.evicted[:, lane].min() > 20
    assert len(set(tokens)) > 5
