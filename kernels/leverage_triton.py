"""Approximate leverage: keys and values are read once, through a random projection."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes


@triton.jit
def _reach(rows, inside, projection, PRECISION: tl.constexpr):
    """|rows @ projection|^2."""
    projected = tl.dot(tl.load(rows, mask=inside, other=0.0).to(tl.float32), projection, input_precision=PRECISION)
    return tl.sum(projected * projected, 1)


@triton.jit
def _leverage(
    k, v, order, layers, lanes, projection, out, stride_layer, stride_lane, stride_head, stride_slot, n, rank,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) // KV_HEADS
    head = tl.program_id(0).to(tl.int64) % KV_HEADS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDE)
    r = tl.arange(0, RANK)
    base = tl.load(layers + pair) * stride_layer + tl.load(lanes + pair) * stride_lane + head * stride_head
    slot = tl.load(order + (pair * KV_HEADS + head) * n + at, mask=at < n, other=0)
    cell = base + slot[:, None] * stride_slot + d[None, :]
    inside = (at < n)[:, None] & (d < D)[None, :]
    g = tl.load(
        projection + (pair * D + d)[:, None] * rank + r[None, :], mask=(d < D)[:, None] & (r < rank)[None, :], other=0.0
    )
    reach = _reach(k + cell, inside, g, PRECISION) * _reach(v + cell, inside, g, PRECISION)
    tl.store(out + (pair * KV_HEADS + head) * n + at, reach, mask=at < n)


def leverage(
    k: Tensor, v: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor, projection: Tensor
) -> Tensor:
    """See ``leverage.leverage``; needs no scratch."""
    layers, lanes = layers_and_lanes(pairs)
    order, projection = order.contiguous(), projection.contiguous()
    assert k.stride() == v.stride()
    assert k.stride(-1) == 1
    kv_heads, n = order.shape[1:]
    d, rank = projection.shape[1:]
    out = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    block = 32
    _leverage[(len(pairs) * kv_heads, triton.cdiv(n, block))](
        k, v, order, layers, lanes, projection, out, *k.stride()[:4], n, rank,
        kv_heads, d, triton.next_power_of_2(d), max(16, triton.next_power_of_2(rank)), block,
        # Three tensor-core products add up to a float32 one.
        "ieee" if torch.version.hip else "tf32x3",
        num_warps=4,
    )  # fmt: skip
    return out
