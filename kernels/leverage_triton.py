"""Approximate leverage: keys and values are read once, and projected in parts of the head dimension."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes
from ringkv.kernels.precision import float32_dot


@triton.jit(do_not_specialize=["n"])
def _leverage(
    k, v, order, layers, lanes, projection, out,
    k_layer, k_lane, k_head, k_slot, v_layer, v_lane, v_head, v_slot, n, rank,
    KV_HEADS: tl.constexpr, D: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) // KV_HEADS
    head = tl.program_id(0).to(tl.int64) % KV_HEADS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    layer, lane = tl.load(layers + pair), tl.load(lanes + pair)
    k += layer * k_layer + lane * k_lane + head * k_head
    v += layer * v_layer + lane * v_lane + head * v_head
    slot = tl.load(order + (pair * KV_HEADS + head) * n + at, mask=at < n, other=0)
    projection += pair * D * rank
    k_reach = tl.zeros([BLOCK, RANK], tl.float32)
    v_reach = tl.zeros([BLOCK, RANK], tl.float32)
    for start in range(0, D, PART):
        d = start + tl.arange(0, PART)
        inside = (at < n)[:, None] & (d < D)[None, :]
        g = tl.load(projection + d[:, None] * rank + r[None, :], mask=(d < D)[:, None] & (r < rank)[None, :], other=0.0)
        keys = tl.load(k + slot[:, None] * k_slot + d[None, :], mask=inside, other=0.0).to(tl.float32)
        values = tl.load(v + slot[:, None] * v_slot + d[None, :], mask=inside, other=0.0).to(tl.float32)
        k_reach = tl.dot(keys, g, k_reach, input_precision=PRECISION)
        v_reach = tl.dot(values, g, v_reach, input_precision=PRECISION)
    reach = tl.sum(k_reach * k_reach, 1) * tl.sum(v_reach * v_reach, 1)
    tl.store(out + (pair * KV_HEADS + head) * n + at, reach, mask=at < n)


def leverage(
    k: Tensor, v: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor, projection: Tensor
) -> Tensor:
    """See ``leverage.leverage``; needs no scratch."""
    layers, lanes = layers_and_lanes(pairs)
    order, projection = order.contiguous(), projection.contiguous()
    assert k.stride(-1) == v.stride(-1) == 1
    kv_heads, n = order.shape[1:]
    d, rank = projection.shape[1:]
    out = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    block = 64
    _leverage[(len(pairs) * kv_heads, triton.cdiv(n, block))](
        k, v, order, layers, lanes, projection, out, *k.stride()[:4], *v.stride()[:4], n, rank,
        kv_heads, d, max(16, triton.next_power_of_2(rank)), block, 32,
        float32_dot(),
        num_warps=4,
    )  # fmt: skip
    return out
