"""Redundancy of keys in two passes over tiles of similarities: each row's last match, then the column means."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes
from ringkv.kernels.precision import float32_dot
from ringkv.kernels.scores_triton import keys_at, tile


@triton.jit
def _norms(keys):
    keys = keys.to(tl.float32)
    return tl.sqrt(tl.sum(keys * keys, 1)) + 1e-8


@triton.jit(do_not_specialize=["n"])
def _last_match(
    k, order, layers, lanes, last, stride_layer, stride_lane, stride_head, stride_slot, n, threshold,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest matching column of a block of rows; 0 where there is none."""
    pair = tl.program_id(0).to(tl.int64) // KV_HEADS
    head = tl.program_id(0).to(tl.int64) % KV_HEADS
    k += tl.load(layers + pair) * stride_layer + tl.load(lanes + pair) * stride_lane + head * stride_head
    order += (pair * KV_HEADS + head) * n
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = keys_at(k, order, row, n, D, WIDE, stride_slot)
    norms = _norms(keys)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        others = keys_at(k, order, column, n, D, WIDE, stride_slot)
        cosine = tl.dot(keys, tl.trans(others), input_precision=PRECISION) / (norms[:, None] * _norms(others)[None, :])
        cosine = tl.where(row[:, None] == column[None, :], 0.0, cosine)
        match = (cosine > threshold) & (column < n)[None, :]
        found = tl.maximum(found, tl.max(tl.where(match, column[None, :], 0), 1))
    tl.store(last + (pair * KV_HEADS + head) * n + row, found, mask=row < n)


@triton.jit(do_not_specialize=["n"])
def _column_means(
    k, order, layers, lanes, last, out, stride_layer, stride_lane, stride_head, stride_slot, n,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The means of a block of columns without each row's last match."""
    pair = tl.program_id(0).to(tl.int64) // KV_HEADS
    head = tl.program_id(0).to(tl.int64) % KV_HEADS
    k += tl.load(layers + pair) * stride_layer + tl.load(lanes + pair) * stride_lane + head * stride_head
    base = (pair * KV_HEADS + head) * n
    order += base
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = keys_at(k, order, column, n, D, WIDE, stride_slot)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        others = keys_at(k, order, row, n, D, WIDE, stride_slot)
        reach = tl.dot(others, tl.trans(keys), input_precision=PRECISION) / _norms(others)[:, None]
        match = tl.load(last + base + row, mask=row < n, other=0)
        left_out = (row >= n)[:, None] | (row[:, None] == column[None, :]) | (match[:, None] == column[None, :])
        total += tl.sum(tl.where(left_out, 0.0, reach), 0)
    tl.store(out + base + column, total / _norms(keys) / n, mask=column < n)


def redundancy(k: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor, threshold: float) -> Tensor:
    """See ``redundancy.redundancy``. Of n x n similarities no more than a tile exists."""
    layers, lanes = layers_and_lanes(pairs)
    order = order.contiguous()
    assert k.stride(-1) == 1
    kv_heads, n, d = order.shape[1], order.shape[2], k.shape[-1]
    last = torch.empty(order.shape, dtype=torch.int32, device=order.device)
    out = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    block = tile(k)
    grid = (len(pairs) * kv_heads, triton.cdiv(n, block))
    shape = (kv_heads, d, triton.next_power_of_2(d), block, float32_dot())
    strides = k.stride()[:4]
    _last_match[grid](k, order, layers, lanes, last, *strides, n, float(threshold), *shape, num_warps=4)
    _column_means[grid](k, order, layers, lanes, last, out, *strides, n, *shape, num_warps=4)
    return out
