"""Window attention in two passes over the keys: the softmax's maximum and sum for each query, then the weights."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes
from ringkv.kernels.precision import float32_dot


def tile(x: Tensor) -> int:
    """Rows and columns of a block of products: the largest that does not spill up to head dim 128."""
    return 64 if x.itemsize == 2 else 16


@triton.jit
def keys_at(k, order, at, n, D: tl.constexpr, WIDE: tl.constexpr, stride):
    """The keys [BLOCK, WIDE] of ranks ``at``, read through ``order``."""
    d = tl.arange(0, WIDE)
    slot = tl.load(order + at, mask=at < n, other=0)
    return tl.load(k + slot[:, None] * stride + d[None, :], mask=(at < n)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _products(
    queries,
    row,
    w,
    keys,
    stride,
    head_stride,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    MAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q.k [ROWS, BLOCK] of a query head, or the largest over MAX heads."""
    product = _product(queries, row, w, keys, stride, D, WIDE, PRECISION)
    for head in range(1, MAX):
        product = tl.maximum(product, _product(queries + head * head_stride, row, w, keys, stride, D, WIDE, PRECISION))
    return product


@triton.jit
def _product(queries, row, w, keys, stride, D: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    d = tl.arange(0, WIDE)
    pointer = queries + row[:, None].to(tl.int64) * stride + d[None, :]
    own = tl.load(pointer, mask=(row < w)[:, None] & (d < D)[None, :], other=0.0)
    if row.shape[0] == 1:  # too few rows for the tensor cores
        return tl.sum(own.to(tl.float32) * keys.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(own, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def _unseen(position, at, n, query_position, row, w):
    """Which keys [ROWS, BLOCK] come after a query."""
    own = tl.load(position + at, mask=at < n, other=0)
    return own[None, :] > tl.load(query_position + row, mask=row < w, other=0)[:, None]


@triton.jit(do_not_specialize=["w", "n"])
def _window_softmax(
    queries, k, order, layers, lanes, only, position, query_position, stats,
    q_layer, q_lane, q_head, q_row, k_layer, k_lane, k_head, k_slot, w, n, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ONLY: tl.constexpr, MAX: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of a block of queries' softmax: stats [P, Hq / MAX, w, 2]."""
    ranked: tl.constexpr = KV_HEADS * (GROUP // MAX)  # query heads, or KV heads where their maximum is taken
    pair = tl.program_id(0).to(tl.int64) // ranked
    head = tl.program_id(0) % ranked
    layer, lane = tl.load(layers + pair), tl.load(lanes + pair)
    kv_head = head * MAX // GROUP
    k += layer * k_layer + lane * k_lane + kv_head.to(tl.int64) * k_head
    queries += layer * q_layer + lane * q_lane + (head * MAX).to(tl.int64) * q_head
    if ONLY:
        queries += tl.load(only + pair) * q_row
    order += (pair * KV_HEADS + kv_head) * n
    position += (pair * KV_HEADS + kv_head) * n
    query_position += pair * w
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = keys_at(k, order, at, n, D, WIDE, k_slot)
        product = _products(queries, row, w, keys, q_row, q_head, D, WIDE, MAX, PRECISION)
        hidden = (at >= n)[None, :]
        if CAUSAL:
            hidden = hidden | _unseen(position, at, n, query_position, row, w)
        product = tl.where(hidden, float("-inf"), product)
        above = tl.maximum(greatest, tl.max(product, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        # Scaled after the difference: the largest weights then carry the least rounding.
        total = total * tl.exp((greatest - safe) * scale) + tl.sum(tl.exp((product - safe[:, None]) * scale), 1)
        greatest = above
    cell = stats + ((pair * ranked + head) * w + row) * 2
    tl.store(cell, greatest, mask=row < w)
    tl.store(cell + 1, total, mask=row < w)


@triton.jit(do_not_specialize=["w", "n"])
def _window_weights(
    queries, k, order, layers, lanes, only, position, query_position, since, stats, out,
    q_layer, q_lane, q_head, q_row, k_layer, k_lane, k_head, k_slot, w, n, scale, share,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ONLY: tl.constexpr, MAX: tl.constexpr, SUM: tl.constexpr, LARGEST: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``share`` times the softmax weights of a block of keys, summed over the queries and over SUM heads.

    LARGEST: for each query the largest of the SUM heads' weights counts, instead of their sum.
    """
    ranked: tl.constexpr = KV_HEADS * (GROUP // MAX)
    outputs: tl.constexpr = ranked // SUM
    pair = tl.program_id(0).to(tl.int64) // outputs
    first = tl.program_id(0) % outputs * SUM
    layer, lane = tl.load(layers + pair), tl.load(lanes + pair)
    kv_head = first * MAX // GROUP
    k += layer * k_layer + lane * k_lane + kv_head.to(tl.int64) * k_head
    queries += layer * q_layer + lane * q_lane + (first * MAX).to(tl.int64) * q_head
    if ONLY:
        queries += tl.load(only + pair) * q_row
    order += (pair * KV_HEADS + kv_head) * n
    position += (pair * KV_HEADS + kv_head) * n
    query_position += pair * w
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = keys_at(k, order, at, n, D, WIDE, k_slot)
    summed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, w, ROWS):
        row = start + tl.arange(0, ROWS)
        together = tl.zeros([ROWS, BLOCK], tl.float32)
        for head in range(SUM):
            product = _products(queries + head * q_head, row, w, keys, q_row, q_head, D, WIDE, MAX, PRECISION)
            cell = stats + ((pair * ranked + first + head) * w + row) * 2
            greatest = tl.load(cell, mask=row < w, other=0.0)
            total = tl.load(cell + 1, mask=row < w, other=1.0)
            weight = tl.exp((product - greatest[:, None]) * scale) / total[:, None]
            counts = (row < w)[:, None]
            if CAUSAL:
                # A query that does not count may see nothing, and its sum be 0.
                new = tl.load(query_position + row, mask=row < w, other=0) >= tl.load(since + pair)
                counts = counts & new[:, None] & ~_unseen(position, at, n, query_position, row, w)
            weight = tl.where(counts, weight, 0.0)
            together = tl.maximum(together, weight) if LARGEST else together + weight
        summed += tl.sum(together, 0)
    tl.store(out + (pair * outputs + tl.program_id(0) % outputs) * n + at, summed * share, mask=at < n)


def summed_attention(
    queries: Tensor,
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    share: float,
    only: Tensor | None = None,
    group_max: bool = False,
    group: str | None = None,
    causal: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``share`` times the attention that keys get, summed over queries.

    ``group``: "sum" adds up the heads of a group, and "max" takes the largest of them for each query.
    ``causal``: the keys' positions [P, H, n], the queries' [P, w], and the first query position [P] that counts.
    The rest is as in ``scores.window_attention``.
    """
    layers, lanes = layers_and_lanes(pairs)
    order = order.contiguous()
    kv_heads, n = order.shape[1:]
    heads, w, d = queries.shape[2] // kv_heads, 1 if only is not None else queries.shape[3], queries.shape[4]
    assert queries.stride(-1) == k.stride(-1) == 1
    most, summed = heads if group_max else 1, heads if group else 1
    ranked = kv_heads * heads // most
    stats = scratch[: len(pairs) * ranked * w * 2]
    if stats.numel() < len(pairs) * ranked * w * 2:
        raise MemoryError(f"{w} queries of {len(pairs)} pairs need more than the scratch of {scratch.nbytes} bytes")
    out = torch.empty(len(pairs), ranked // summed, n, dtype=torch.float32, device=order.device)
    position, query_position, since = (order, order, order) if causal is None else (x.contiguous() for x in causal)
    alone = w == 1 and causal is None
    block = 64 if alone else tile(queries)
    # Without a mask the queries are the window's, or its last one. With one they may be a prompt's, of any length.
    rows = 1 if alone else block if causal is not None else max(16, min(triton.next_power_of_2(w), block))
    strides = (*queries.stride()[:4], *k.stride()[:4])
    shape = (kv_heads, heads, d, triton.next_power_of_2(d), only is not None, most)
    _window_softmax[(len(pairs) * ranked, triton.cdiv(w, rows))](
        queries, k, order, layers, lanes, only, position, query_position, stats, *strides, w, n, d**-0.5,
        *shape, causal is not None, rows, block, float32_dot(), num_warps=8 if most > 1 else 4, num_stages=2,
    )  # fmt: skip
    _window_weights[(len(pairs) * ranked // summed, triton.cdiv(n, block))](
        queries, k, order, layers, lanes, only, position, query_position, since, stats, out, *strides, w, n, d**-0.5,
        share, *shape, summed, group == "max", causal is not None, rows, block, float32_dot(),
        # What several heads need at once would spill.
        num_warps=8 if summed > 1 else 4, num_stages=1 if summed > 1 else 2,
    )  # fmt: skip
    return out


def window_attention(
    queries: Tensor,
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    only: Tensor | None = None,
    group_max: bool = False,
) -> Tensor:
    """See ``scores.window_attention``."""
    w = 1 if only is not None else queries.shape[3]
    return summed_attention(queries, k, order, pairs, scratch, 1 / w, only, group_max)
