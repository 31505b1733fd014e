"""The measuring script measures what it says."""

from __future__ import annotations

import pytest
import torch

from ringkv import Engine, RingConfig
from ringkv.engine.policies import POLICIES, as_policy
from tiny import tiny_config, tiny_decoder, tiny_weights


@pytest.fixture(scope="module")
def quality():
    """bench/quality.py; the policy that it registers is taken back."""
    before = dict(POLICIES)
    from ringkv.bench import quality

    POLICIES.setdefault("largest-first", quality.LargestFirst)
    yield quality
    POLICIES.clear()
    POLICIES.update(before)


def test_policies_side_by_side_score_as_alone(quality):
    config = tiny_config()
    model = tiny_decoder(config, tiny_weights(config))
    names = [name for name, cls in POLICIES.items() if cls.evicts]
    assert names[-1] == "largest-first"
    ids = torch.randint(97, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    ring = RingConfig(24, 8, quality.PerLane(tuple(map(as_policy, names))))
    seeds = list(range(len(names)))
    together = Engine(model, ring=ring, lanes=len(names)).score(ids, seeds=seeds)
    for name, seed, row in zip(names, seeds, together, strict=True):
        alone = Engine(model, ring=RingConfig(24, 8, name)).score(ids, seeds=[seed])[0]
        torch.testing.assert_close(row, alone, rtol=1e-6, atol=1e-6)
    assert len(torch.unique(together[:, -1])) == len(names)


def test_loops(quality):
    mixed = torch.randint(97, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    for period in (1, 7, 64):
        assert quality.loops(mixed + (mixed[:period] * 200)[:200])
    assert not quality.loops(mixed)
    assert not quality.loops(mixed + (mixed[:65] * 4)[:200])
    assert not quality.loops(mixed + (mixed[:7] * 200)[:199])


def test_distinct(quality):
    assert quality.distinct([1, 2, 3, 4]) == 1
    assert quality.distinct([1] * 12) == 1 / 10
