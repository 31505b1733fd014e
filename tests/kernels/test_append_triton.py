from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel_checks import SHAPES, assert_as_exact, clone, layer, widened
from ringkv.kernels import append, append_triton
from ringkv.kernels.rotate import Angles


def inputs(ring, group, dtype, norm):
    lanes, kv_heads, _, d = ring.k.shape
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(lanes, (group + 2) * kv_heads * d, generator=generator).to(dtype)
    norms = tuple(1 + 0.2 * torch.randn(d, generator=generator).to(dtype) for _ in range(2)) if norm else None
    angle = torch.rand(lanes, d // 2, generator=generator) * 6
    return qkv, norms, 1e-6, Angles(angle.cos(), angle.sin())


def run(args, ring, backend):
    """The queries, and the ring afterwards."""
    ring = clone(ring)
    return {"torch": append, "triton": append_triton}[backend].append(*args, ring), ring


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES)
def test_writes_what_the_twin_writes_and_nothing_else(slots, group, d, dtype):
    ring = layer(3, 2, group, slots, d, 5, dtype)
    ring = replace(ring, active=torch.tensor([True, False, True]))
    args = inputs(ring, group, dtype, norm=group != 3)
    running = ring.active
    (q, after), (twin_q, twin), (exact_q, exact) = (
        run(args, ring, "triton"),
        run(args, ring, "torch"),
        run(tuple(map(widened, args)), widened(ring), "torch"),
    )
    assert_as_exact(q[running], twin_q[running], exact_q[running])
    assert_as_exact(after.k, twin.k, exact.k)
    assert_as_exact(after.queries, twin.queries, exact.queries)
    assert torch.equal(after.v, twin.v)
    assert torch.equal(after.v_range, twin.v_range)
    # Exactly the rows that the twin touches are touched.
    for name in ("k", "queries"):
        before = getattr(ring, name)
        assert torch.equal((getattr(after, name) != before).any(-1), (getattr(twin, name) != before).any(-1)), name
    marks = ring.position.clone()
    for lane in (0, 2):
        slot = ring.order[lane, :, ring.count[lane]].long()
        marks[lane].scatter_(1, slot[:, None], int(ring.seen[lane]))
    assert torch.equal(after.position, marks)
    for name in ("order", "count", "evictions", "seen", "active"):
        assert torch.equal(getattr(after, name), getattr(ring, name)), name


def test_writes_into_the_storage_itself():
    """A copy of a layer (`.contiguous()`) would lose the write: such a view is refused."""
    ring = layer(2, 2, 3, 63, 64, 5, torch.float32)
    strided = replace(ring, k=torch.zeros(2, 2, 63, 128)[..., ::2])
    with pytest.raises(AssertionError):
        append_triton.append(*inputs(ring, 3, torch.float32, norm=True), strided)
