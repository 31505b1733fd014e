"""Decode attention over the ring: the slots of each lane and KV head are split over programs, and merged."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.append_triton import append
from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles

TILE_BYTES = 16384  # of keys, and as many of values, that a program reads at once
PROGRAMS = 264  # two for each multiprocessor of a large GPU: all run at once
MERGED = 16  # splits that are joined at once; all of them in registers would spill


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q,
    k,
    v,
    position,
    count,
    evictions,
    active,
    parts,
    stats,
    slots,
    splits,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One split of one lane and KV head: its weighted values, their greatest logit and the sum of their weights."""
    lane = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    base = tl.program_id(0).to(tl.int64) * slots
    # Until its first eviction a lane fills the slots in order; the new token is not counted yet.
    span = tl.where(tl.load(evictions + lane) > 0, slots, tl.minimum(tl.load(count + lane) + 1, slots))
    span = tl.where(tl.load(active + lane) != 0, span, 0)
    chunk = tl.cdiv(tl.cdiv(span, BLOCK), splits) * BLOCK

    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    head = tl.program_id(0).to(tl.int64) * GROUP + row
    own = (row < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=own, other=0.0)

    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(split * chunk, tl.minimum((split + 1) * chunk, span), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        visible = tl.load(position + base + slot, mask=slot < span, other=-1) >= 0
        inside = visible[:, None] & (d < D)[None, :]
        pointer = (base + slot)[:, None] * D + d[None, :]
        keys = tl.load(k + pointer, mask=inside, other=0.0)
        logits = tl.dot(query, tl.trans(keys), input_precision="ieee")
        logits = tl.where(visible[None, :], logits, float("-inf"))
        above = tl.maximum(greatest, tl.max(logits, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        # Scaled after the difference: the largest weights then carry the least rounding.
        weight = tl.exp((logits - safe[:, None]) * scale)
        fade = tl.exp((greatest - safe) * scale)
        values = tl.load(v + pointer, mask=inside, other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        total = total * fade + tl.sum(weight, 1)
        greatest = above

    part = head * splits + split
    tl.store(parts + part[:, None] * D + d[None, :], mixed, mask=own)
    tl.store(stats + part * 2, greatest, mask=row < GROUP)
    tl.store(stats + part * 2 + 1, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, stats, out, splits, scale, D: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """Join the splits of one query head by their log-sum-exp, COLUMNS at a time."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDE)
    greatest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    mixed = tl.zeros([WIDE], tl.float32)
    for start in range(0, splits, COLUMNS):
        split = start + tl.arange(0, COLUMNS)
        part = head * splits + split
        top = tl.load(stats + part * 2, mask=split < splits, other=float("-inf"))
        sums = tl.load(stats + part * 2 + 1, mask=split < splits, other=0.0)
        above = tl.maximum(greatest, tl.max(top, 0))
        safe = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp((top - safe) * scale)
        fade = tl.exp((greatest - safe) * scale)
        inside = (split < splits)[:, None] & (d < D)[None, :]
        values = tl.load(parts + part[:, None] * D + d[None, :], mask=inside, other=0.0)
        mixed = mixed * fade + tl.sum(values * weight[:, None], 0)
        total = total * fade + tl.sum(sums * weight, 0)
        greatest = above
    tl.store(out + head * D + d, mixed / tl.where(total > 0, total, 1.0), mask=d < D)


def attend(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, ring: LayerRing) -> Tensor:
    """See ``attention.attend``."""
    return decode_attention(append(qkv, norms, eps, angles, ring), ring).flatten(1)


def decode_attention(q: Tensor, ring: LayerRing) -> Tensor:
    """See ``attention.decode_attention``."""
    for tensor in (q, ring.k, ring.v, ring.position):
        assert tensor.is_contiguous()
    lanes, kv_heads, slots, d = ring.k.shape
    heads, group = q.shape[1], q.shape[1] // kv_heads
    wide = triton.next_power_of_2(d)
    block = max(16, min(64, TILE_BYTES // (wide * ring.k.itemsize)))
    splits = max(1, min(triton.cdiv(slots, block), PROGRAMS // (lanes * kv_heads)))
    scale = d**-0.5
    parts = torch.empty(lanes, heads, splits, d, dtype=torch.float32, device=q.device)
    stats = torch.empty(lanes, heads, splits, 2, dtype=torch.float32, device=q.device)
    _attend[(lanes * kv_heads, splits)](
        q,
        ring.k,
        ring.v,
        ring.position,
        ring.count,
        ring.evictions,
        ring.active,
        parts,
        stats,
        slots,
        splits,
        scale,
        kv_heads,
        group,
        d,
        max(16, triton.next_power_of_2(group)),
        wide,
        block,
        num_warps=4,
        # Marks are read a stage before the keys that they mask: five stages keep two blocks of each under way.
        num_stages=2 if torch.version.hip else 5,
    )
    out = torch.empty_like(q)
    _merge[(lanes * heads,)](parts, stats, out, splits, scale, d, wide, MERGED, num_warps=4)
    return out
