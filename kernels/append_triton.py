"""Query/key norm, rotary embedding and the write to the ring, in one kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles


@triton.jit
def _append(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    ring_k,
    ring_v,
    position,
    order,
    v_range,
    queries,
    count,
    seen,
    active,
    eps,
    slots,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if tl.load(active + lane) == 0:
        return
    heads: tl.constexpr = KV_HEADS * GROUP
    half: tl.constexpr = D // 2
    at = tl.load(seen + lane)
    base = (lane * KV_HEADS + head) * slots
    slot = base + tl.load(order + base + tl.load(count + lane))

    # The head group's queries, then its key and its value; each row in halves, as the rotation pairs them.
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    own = d < half
    is_query, is_key, is_value = row < GROUP, row == GROUP, row == GROUP + 1
    source = tl.where(is_query, head * GROUP + row, heads + head + tl.where(is_key, 0, KV_HEADS)) * D
    pointer = qkv + lane * ((heads + 2 * KV_HEADS) * D) + source[:, None] + d[None, :]
    inside = (row < GROUP + 2)[:, None] & own[None, :]
    first = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointer + half, mask=inside, other=0.0).to(tl.float32)
    left, right = first, second
    if NORM:
        scale = tl.rsqrt(tl.sum(left * left + right * right, 1) / D + eps)[:, None]
        left *= scale * _gains(q_norm + d, k_norm + d, is_query, own)
        right *= scale * _gains(q_norm + half + d, k_norm + half + d, is_query, own)
    c = tl.load(cos + lane * half + d, mask=own)[None, :]
    s = tl.load(sin + lane * half + d, mask=own)[None, :]
    first = tl.where(is_value[:, None], first, left * c - right * s)
    second = tl.where(is_value[:, None], second, right * c + left * s)

    query = lane * heads + head * GROUP + row
    _store_halves(out + query[:, None] * D + d[None, :], half, first, second, is_query, own)
    recent = query * window + at % window
    _store_halves(queries + recent[:, None] * D + d[None, :], half, first, second, is_query, own)
    cell = (slot + tl.zeros_like(row))[:, None] * D + d[None, :]
    _store_halves(ring_k + cell, half, first, second, is_key, own)
    _store_halves(ring_v + cell, half, first, second, is_value, own)
    # The range of what is stored, after rounding.
    first = first.to(ring_v.dtype.element_ty).to(tl.float32)
    second = second.to(ring_v.dtype.element_ty).to(tl.float32)
    high = tl.max(tl.where(own[None, :], tl.maximum(first, second), float("-inf")), 1)
    low = tl.min(tl.where(own[None, :], tl.minimum(first, second), float("inf")), 1)
    tl.store(v_range + slot + tl.zeros_like(row), high - low, mask=is_value)
    tl.store(position + slot, at.to(tl.int32))


@triton.jit
def _gains(q_norm, k_norm, is_query, own):
    q, k = tl.load(q_norm, mask=own)[None, :], tl.load(k_norm, mask=own)[None, :]
    return tl.where(is_query[:, None], q, k).to(tl.float32)


@triton.jit
def _store_halves(pointer, half, first, second, rows, own):
    mask = rows[:, None] & own[None, :]
    tl.store(pointer, first, mask=mask)
    tl.store(pointer + half, second, mask=mask)


def append(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, ring: LayerRing) -> Tensor:
    """See ``append.append``. One program a lane and KV head."""
    cos, sin = angles.cos, angles.sin
    for tensor in (qkv, cos, sin, ring.k, ring.v, ring.position, ring.order, ring.v_range, ring.queries):
        assert tensor.is_contiguous()
    lanes, kv_heads, slots, d = ring.k.shape
    heads, window = ring.queries.shape[1:3]
    group = heads // kv_heads
    # Eight elements a thread are a vector of 16 bytes in half precision.
    rows, half = max(8, triton.next_power_of_2(group + 2)), triton.next_power_of_2(d // 2)
    out = torch.empty(lanes, heads, d, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or (qkv, qkv)
    _append[(lanes, kv_heads)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        out,
        ring.k,
        ring.v,
        ring.position,
        ring.order,
        ring.v_range,
        ring.queries,
        ring.count,
        ring.seen,
        ring.active,
        eps,
        slots,
        window,
        kv_heads,
        group,
        d,
        norms is not None,
        rows,
        half,
        num_warps=max(1, min(8, rows * half // 256)),
    )
    return out
