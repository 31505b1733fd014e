from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel_checks import SHAPES, assert_as_exact, layer, poisoned, three_ways
from ringkv.kernels import attention_triton
from ringkv.kernels.attention import decode_attention


def queries(ring, group, dtype):
    lanes, kv_heads, _, d = ring.k.shape
    return torch.randn(lanes, kv_heads * group, d, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("programs", [4, 264])
@pytest.mark.parametrize("slots, group, d, dtype", SHAPES)
def test_as_exact_as_the_twin(slots, group, d, dtype, programs, monkeypatch):
    """With few programs each walks over many blocks of slots, with many each has one."""
    monkeypatch.setattr(attention_triton, "PROGRAMS", programs)
    ring = layer(2, 2, group, slots, d, 4, dtype)
    q = queries(ring, group, dtype)
    kernel, twin, exact = three_ways(decode_attention, q, ring, launcher=attention_triton.decode_attention)
    assert_as_exact(kernel, twin, exact, d if dtype == torch.float32 else 16)  # half precision is summed in float32
    assert torch.equal(attention_triton.decode_attention(q, poisoned(ring)), kernel)


def test_a_lane_not_yet_evicted_reads_its_span_only_and_an_idle_lane_gives_zero():
    ring = layer(3, 2, 3, 100, 64, 4, torch.float32)
    count = torch.tensor([40, 20, 70], dtype=torch.int32)
    order = torch.arange(100, dtype=torch.int32).expand(3, 2, 100).contiguous()
    # Marks behind the span: a kernel that looks there sees slots that no twin does.
    position = order.clone()
    ring = replace(
        ring,
        count=count,
        order=order,
        position=position,
        evictions=torch.zeros(3, dtype=torch.int32),
        active=torch.tensor([True, False, True]),
    )
    q = queries(ring, 3, torch.float32)
    q[1] = torch.nan
    span = torch.tensor([41, 0, 71])  # the new token included
    marked = replace(ring, position=position.masked_fill(order >= span[:, None, None], -1))
    _, twin, exact = three_ways(decode_attention, q, marked, launcher=decode_attention)
    kernel = attention_triton.decode_attention(q, ring)
    assert_as_exact(kernel, twin, exact)
    assert (kernel[1] == 0).all()


def test_nothing_visible_gives_zero():
    ring = layer(1, 2, 3, 63, 64, 4, torch.float16)
    ring = poisoned(replace(ring, position=torch.full_like(ring.position, -1)))
    assert (attention_triton.decode_attention(queries(ring, 3, torch.float16), ring) == 0).all()


def test_large_logits_stay_finite():
    ring = layer(1, 1, 8, 63, 64, 4, torch.float32)
    q = 1000 * queries(ring, 8, torch.float32)
    kernel, twin, exact = three_ways(decode_attention, q, ring, launcher=attention_triton.decode_attention)
    assert_as_exact(kernel, twin, exact)
