"""Decode attention on the torch path against a softmax over the visible slots written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel_checks import layer
from ringkv.kernels.attention import decode_attention
from ringkv.kernels.layer import LayerRing

SLOTS = 100


def of_spans(ring: LayerRing, spans: list[int]) -> LayerRing:
    """The layer with so many slots of each lane visible at most; a lane of none is idle."""
    span = torch.tensor(spans)
    beyond = torch.arange(SLOTS) >= span[:, None, None]
    return replace(ring, position=ring.position.masked_fill(beyond, -1), active=span > 0)


def written_out(q, ring: LayerRing, lane: int):
    """[Hq, D] of one lane, in float64."""
    if not ring.active[lane]:
        return torch.zeros_like(q[lane]).double()
    heads = []
    for head, query in enumerate(q[lane].double()):
        own = head // (q.shape[1] // ring.k.shape[1])
        seen = [slot for slot in range(SLOTS) if ring.position[lane, own, slot] >= 0]
        weights = (ring.k[lane, own, seen].double() @ query / q.shape[2] ** 0.5).exp()
        heads.append(weights @ ring.v[lane, own, seen].double() / weights.sum())
    return torch.stack(heads)


@pytest.mark.parametrize(
    "dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_lanes_of_any_span(dtype, atol, kv_heads):
    whole = layer(6, kv_heads, 3, SLOTS, 16, 4, dtype)
    q = torch.randn(6, 3 * kv_heads, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    for spans in ([64] * 6, [SLOTS] * 6, [37, 64, 64, 0, SLOTS, SLOTS], [0, 64, 64, 64, SLOTS, 0], [64] * 5 + [SLOTS]):
        ring = of_spans(whole, spans)
        out = decode_attention(q, ring)
        for lane in range(6):
            assert torch.allclose(out[lane].double(), written_out(q, ring, lane), rtol=0, atol=atol)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", [1, 5, 7, 8])
def test_a_lane_does_not_depend_on_its_neighbours(kv_heads, group):
    """To the bit, whether they run, hold less, or are idle."""
    ring = layer(4, kv_heads, group, SLOTS, 16, 4, torch.float32)
    q = torch.randn(4, kv_heads * group, 16, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = decode_attention(q, ring)
        for lane in range(4):
            for others in (0, 64):
                spans = [SLOTS if each == lane else others for each in range(4)]
                assert torch.equal(decode_attention(q, of_spans(ring, spans))[lane], together[lane])
    finally:
        torch.set_num_threads(threads)
