"""One eviction against the papers' own published code, run on the same random tensors (DESIGN 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ringkv.engine.policies import RKV, Policy, SnapKV, ValueRange, VaseAttnV, VaseDKV
from ringkv.engine.ring.evict import evict, live_tokens
from ringkv.engine.ring.storage import Ring
from rings import fill, make_ring, positions

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "eviction.safetensors")
CASES = [f"case{i}" for i in range(4)]
LAYER = 1


class GivenProjection(VaseDKV):
    """vase-dkv with the projection that the published code drew."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__(rank=matrices.shape[-1])
        object.__setattr__(self, "matrices", matrices)

    def projection(self, live):
        return self.matrices


def filled(case: str, policy: Policy, sinks: int) -> tuple[Ring, list[tuple[int, int]]]:
    """The case's rows in layer 1, lanes B .. 1, slots permuted; lane 0 holds other tokens."""
    q, k, v = (GOLDEN[f"{case}.{name}"] for name in "qkv")
    budget, window = (int(GOLDEN[f"{case}.{name}"]) for name in ("budget", "window"))
    assert k.shape[2] == budget + window
    rows = len(q)
    ring = make_ring(
        policy,
        budget=budget,
        window=window,
        sinks=sinks,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=k.shape[3],
        layers=2,
        lanes=rows + 1,
    )
    noise = torch.Generator().manual_seed(5)
    for layer in range(2):
        others = [torch.randn(x[0].shape, generator=noise) for x in (q, k, v)]
        fill(ring, layer, 0, others[0], others[1][:, :-1], others[2][:, :-1], scramble=9)
    pairs = [(LAYER, rows - row) for row in range(rows)]
    for row, (layer, lane) in enumerate(pairs):
        fill(ring, layer, lane, q[row], k[row], v[row], scramble=row + 1)
    return ring, pairs


def check_kept(ring: Ring, pairs: list[tuple[int, int]], want: list[Tensor]) -> None:
    """Evict, and compare; where two priorities differ by less than 1e-6 relative, either may have gone."""
    priority = ring.policy.priority(live_tokens(ring, pairs))
    neighbour = ring.position[:, 0].clone()
    evict(ring, pairs)
    assert torch.equal(ring.position[:, 0], neighbour)
    for pair, expected, ranked in zip(pairs, want, priority, strict=True):
        for live, head, row in zip(positions(ring, *pair), expected, ranked, strict=True):
            assert len(live) == ring.config.budget
            differ = row[sorted(set(live) ^ set(head.tolist()))]
            if len(differ):
                assert differ.max() - differ.min() < 1e-6 * differ.abs().max(), f"{pair}: {differ}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name, kernel", [("snapkv_nosmooth", 1), ("snapkv_smooth", 5)])
def test_snapkv(case, name, kernel):
    check_kept(*filled(case, SnapKV(kernel), sinks=0), GOLDEN[f"{case}.{name}.kept"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name, lam", [("rkv_last", 0.1), ("rkv_last_percent", 0.07)])
def test_rkv(case, name, lam):
    ring, pairs = filled(case, RKV(lam), sinks=0)
    check_kept(ring, pairs, [GOLDEN[f"{case}.{name}.kept.{row}"] for row in range(len(pairs))])


@pytest.mark.parametrize("case", CASES)
def test_vase_dkv(case):
    policy = GivenProjection(GOLDEN[f"{case}.vase_dkv.projection"][:, 0])
    check_kept(*filled(case, policy, sinks=4), GOLDEN[f"{case}.vase_dkv.kept"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name, kernel", [("nosmooth", 1), ("smooth", 5)])
def test_vase_attnv(case, name, kernel):
    probs = GOLDEN[f"{case}.vase_attnv_{name}.probs"]
    draw = GOLDEN[f"{case}.vase_attnv_{name}.one_draw"]
    policy = VaseAttnV(kernel=kernel)
    ring, pairs = filled(case, policy, sinks=4)
    assert ring.config.budget // 4 == int(GOLDEN[f"{case}.n_large"])
    weights, kept = policy.weights(live_tokens(ring, pairs))
    assert torch.equal(kept, probs == 0)
    error = (weights - probs).abs() / probs
    assert error[~kept].max() < 1e-5
    candidates = probs.shape[-1]
    evict(ring, pairs)
    for row, pair in enumerate(pairs):
        for head, live in enumerate(positions(ring, *pair)):
            protected = set(kept[row, head].nonzero().flatten().tolist())
            recent = set(range(candidates, candidates + ring.config.window))
            for survivors in (set(live), set(draw[row, head].tolist())):
                assert len(survivors) == ring.config.budget
                assert protected | recent <= survivors


@pytest.mark.parametrize("case", CASES)
def test_value_range(case):
    ring, pairs = filled(case, ValueRange(), sinks=4)
    assert torch.equal(ring.policy.priority(live_tokens(ring, pairs)), GOLDEN[f"{case}.value_range"])
