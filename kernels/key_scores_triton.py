"""Products of keys with vectors of their own for each query head, and lengths: each key is read once a query head."""

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
def _key_scores(
    k, order, layers, lanes, linear, squared, moduli, out,
    k_layer, k_lane, k_head, k_slot, n, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SQUARED: tl.constexpr, MODULI: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys under one query head. Components f and f + D/2 are read together, PART pairs at a time."""
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)  # pair and query head
    head = row // GROUP  # pair and KV head
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = head // KV_HEADS
    k += tl.load(layers + pair) * k_layer + tl.load(lanes + pair) * k_lane + head % KV_HEADS * k_head
    slot = tl.load(order + head * n + at, mask=at < n, other=0)
    score = tl.zeros([BLOCK], tl.float32)
    for start in range(0, HALF, PART):
        f = start + tl.arange(0, PART)
        inside = (at < n)[:, None] & (f < HALF)[None, :]
        first = tl.load(k + slot[:, None] * k_slot + f[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(k + slot[:, None] * k_slot + (f + HALF)[None, :], mask=inside, other=0.0).to(tl.float32)
        a = tl.load(linear + row * D + f, mask=f < HALF, other=0.0)
        b = tl.load(linear + row * D + HALF + f, mask=f < HALF, other=0.0)
        score += tl.sum(first * a[None, :] + second * b[None, :], 1)
        if MODULI:
            weight = tl.load(moduli + row * HALF + f, mask=f < HALF, other=0.0)
            score += tl.sum(tl.sqrt(first * first + second * second) * weight[None, :], 1)
    if SQUARED:
        for top in range(0, rows, ROWS):
            r = top + tl.arange(0, ROWS)
            product = tl.zeros([BLOCK, ROWS], tl.float32)
            for start in range(0, D, PART):
                d = start + tl.arange(0, PART)
                inside = (at < n)[:, None] & (d < D)[None, :]
                keys = tl.load(k + slot[:, None] * k_slot + d[None, :], mask=inside, other=0.0).to(tl.float32)
                given = (d < D)[:, None] & (r < rows)[None, :]
                own = tl.load(squared + (row * rows + r[None, :]) * D + d[:, None], mask=given, other=0.0)
                product = tl.dot(keys, own, product, input_precision=PRECISION)
            score += tl.sum(product * product, 1)
    tl.store(out + row * n + at, score, mask=at < n)


def key_scores(
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    linear: Tensor,
    squared: Tensor | None = None,
    moduli: Tensor | None = None,
) -> Tensor:
    """See ``key_scores.key_scores``; needs no scratch."""
    layers, lanes = layers_and_lanes(pairs)
    order, linear = order.contiguous(), linear.contiguous()
    assert k.stride(-1) == 1
    (kv_heads, n), (heads, d) = order.shape[1:], linear.shape[1:]
    rows = 0 if squared is None else squared.shape[2]
    out = torch.empty(len(pairs), heads, n, dtype=torch.float32, device=order.device)
    block = 64
    _key_scores[(len(pairs) * heads, triton.cdiv(n, block))](
        k, order, layers, lanes, linear,
        linear if squared is None else squared.contiguous(), linear if moduli is None else moduli.contiguous(), out,
        *k.stride()[:4], n, rows,
        kv_heads, heads // kv_heads, d, squared is not None, moduli is not None,
        max(16, min(64, triton.next_power_of_2(rows))), block, 32, float32_dot(),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n"])
def _lengths(
    x, order, layers, lanes, out, x_layer, x_lane, x_head, x_slot, n,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # pair and KV head
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDE)
    pair = head // KV_HEADS
    x += tl.load(layers + pair) * x_layer + tl.load(lanes + pair) * x_lane + head % KV_HEADS * x_head
    slot = tl.load(order + head * n + at, mask=at < n, other=0)
    inside = (at < n)[:, None] & (d < D)[None, :]
    rows = tl.load(x + slot[:, None] * x_slot + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + head * n + at, tl.sqrt(tl.sum(rows * rows, 1)), mask=at < n)


def lengths(x: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor) -> Tensor:
    """See ``key_scores.lengths``; needs no scratch."""
    layers, lanes = layers_and_lanes(pairs)
    order = order.contiguous()
    assert x.stride(-1) == 1
    kv_heads, n = order.shape[1:]
    d, block = x.shape[-1], 32
    out = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    _lengths[(len(pairs) * kv_heads, triton.cdiv(n, block))](
        x, order, layers, lanes, out, *x.stride()[:4], n, kv_heads, d, triton.next_power_of_2(d), block, num_warps=4
    )
    return out
