from __future__ import annotations

import math

import pytest
import torch

from ringkv.kernels.backend import use
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.table import free, lowest

STRANGE = [0.0, -0.0, 1.0, 1.5, -3.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4028235e38, -3e38]


def rows(width, pairs=1, strange=False):
    """float32 [pairs, 2, width] with many equals, and a mask of about a third."""
    generator = torch.Generator().manual_seed(width)
    value = torch.randn(pairs, 2, width, generator=generator).bfloat16().float()
    if strange:
        value = torch.tensor(STRANGE)[torch.randint(len(STRANGE), value.shape, generator=generator)]
    return value, torch.rand(value.shape, generator=generator) < 0.3


@pytest.mark.parametrize(
    "width, strange", [(7, True), (63, False), (100, True), (111, False), (1000, False), (2048, False), (4500, True)]
)
def test_victims_are_the_twins(width, strange):
    priority, protected = rows(width, strange=strange)
    few = {0, 1, width // 2} if width < 200 else {width // 2}
    for count in few | {int((~protected).sum(-1).min())}:
        with use("triton"):
            got = lowest(priority, protected, count)
        assert torch.equal(got, lowest(priority, protected, count)), count
        assert (got.sum(-1) == count).all()


def test_zeros_of_either_sign_are_equal():
    priority = torch.tensor([[0.0, -0.0, 0.0, -0.0, -0.0, 1.0]])
    with use("triton"):
        victim = lowest(priority, torch.zeros(1, 6, dtype=torch.bool), 3)
    assert victim.tolist() == [[True] * 3 + [False] * 3]


def test_every_row_may_have_its_own_count():
    priority, protected = rows(111, pairs=3)
    count = torch.tensor([[[3], [0]], [[40], [17]], [[1], [60]]])
    with use("triton"):
        got = lowest(priority, protected, count)
    assert torch.equal(got, lowest(priority, protected, count))
    assert torch.equal(got.sum(-1, keepdim=True), count)


@pytest.mark.parametrize("slots, window", [(63, 7), (111, 8), (1000, 100), (2500, 64)])
def test_free_is_the_twins(slots, window):
    generator = torch.Generator().manual_seed(1)
    layers, lanes, heads = 2, 3, 2
    order = torch.stack([torch.randperm(slots, generator=generator) for _ in range(layers * lanes * heads)])
    order = order.view(layers, lanes, heads, slots).int()
    position = order.clone()
    count = torch.full((layers, lanes), slots, dtype=torch.int32)
    count[1, 2] -= 1  # the host is wrong about this pair
    pairs = Pairs([(0, 1), (1, 0), (1, 2)], torch.device("cpu"))
    slot = order[pairs.layer, pairs.lane].long()
    victim = lowest(*(x[..., : slots - window] for x in rows(slots)), window).expand(3, -1, -1).contiguous()
    tables = order, position, count, torch.zeros_like(count)
    results = []
    for backend in ("triton", "torch"):
        own = [table.clone() for table in tables]
        with use(backend):
            results.append([*own, free(victim, slot, window, pairs, *own)])
    for kernel, twin in zip(*results, strict=True):
        assert torch.equal(kernel, twin)
    order, position, count, evictions, freed = results[0]
    assert count[0, 1] == slots - window
    assert evictions[0, 1] == 1
    assert torch.equal(order[0, 1, :, slots - window :].long(), freed[0])
    assert (position[0, 1] == -1).sum() == heads * window
    for before, after in zip(tables, results[0], strict=False):
        assert torch.equal(before[1, 2], after[1, 2])
