"""Query/key norm, rotary embedding and the write to the ring, in one kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.layer import LayerRing, Places


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
    WIDE: tl.constexpr,
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

    # The head group's queries, and below them its key.
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    is_query = (row < GROUP)[:, None] & (d < half)[None, :]
    is_key = (row == GROUP)[:, None] & (d < half)[None, :]
    inside = is_query | is_key
    source = tl.where(row < GROUP, head * GROUP + row, heads + head) * D
    token = qkv + lane * ((heads + 2 * KV_HEADS) * D)
    pointer = token + source[:, None] + d[None, :]
    first = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointer + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        own = d < half
        first *= scale * tl.where(
            is_query, tl.load(q_norm + d, mask=own)[None, :], tl.load(k_norm + d, mask=own)[None, :]
        ).to(tl.float32)
        second *= scale * tl.where(
            is_query, tl.load(q_norm + half + d, mask=own)[None, :], tl.load(k_norm + half + d, mask=own)[None, :]
        ).to(tl.float32)
    c = tl.load(cos + lane * half + d, mask=d < half)[None, :]
    s = tl.load(sin + lane * half + d, mask=d < half)[None, :]
    turned = first * c - second * s
    second = second * c + first * s
    first = turned

    query = lane * heads + head * GROUP + row
    pointer = out + query[:, None] * D + d[None, :]
    tl.store(pointer, first, mask=is_query)
    tl.store(pointer + half, second, mask=is_query)
    pointer = queries + (query * window + at % window)[:, None] * D + d[None, :]
    tl.store(pointer, first, mask=is_query)
    tl.store(pointer + half, second, mask=is_query)
    pointer = ring_k + slot * D + tl.zeros_like(row)[:, None] + d[None, :]
    tl.store(pointer, first, mask=is_key)
    tl.store(pointer + half, second, mask=is_key)

    d = tl.arange(0, WIDE)
    value = tl.load(token + (heads + KV_HEADS + head) * D + d, mask=d < D).to(ring_v.dtype.element_ty)
    tl.store(ring_v + slot * D + d, value, mask=d < D)
    value = value.to(tl.float32)
    high = tl.max(tl.where(d < D, value, float("-inf")), 0)
    tl.store(v_range + slot, high - tl.min(tl.where(d < D, value, float("inf")), 0))
    tl.store(position + slot, at.to(tl.int32))


def append(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    ring: LayerRing,
    at: Places | None,
) -> Tensor:
    """See ``append.append``; marks positions too, and needs no ``at``. One program a lane and KV head."""
    for tensor in (qkv, cos, sin, ring.k, ring.v, ring.position, ring.order, ring.v_range, ring.queries):
        assert tensor.is_contiguous()
    lanes, kv_heads, slots, d = ring.k.shape
    heads, window = ring.queries.shape[1:3]
    group = heads // kv_heads
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
        triton.next_power_of_2(group + 1),
        triton.next_power_of_2(d // 2),
        triton.next_power_of_2(d),
        num_warps=1 if group < 4 else 4,
    )
    return out
