"""Victim selection without a sort, and the partition of a row's slots. One program a row, in blocks."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes

BLOCK = 2048  # a whole row in registers spills


@triton.jit
def _keys(priority, protected, start, width, BLOCK: tl.constexpr):
    """Unsigned numbers in the order of the priorities, and which of them may be chosen."""
    at = start + tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(priority + at, mask=inside, other=0.0)
    value = tl.where(value == value, value, float("-inf"))
    value = tl.minimum(value, 3.4028234663852886e38) + 0.0  # the sum makes -0.0 a 0.0
    bits = value.to(tl.int32, bitcast=True)
    # Negative floats order against their bits, the others with them.
    bits = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return bits, inside & (tl.load(protected + at, mask=inside, other=1) == 0)


@triton.jit(do_not_specialize=["width", "count"])
def _lowest(priority, protected, counts, victim, width, count, OWN_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    priority, protected, victim = priority + row * width, protected + row * width, victim + row * width
    if OWN_COUNT:
        count = tl.load(counts + row).to(tl.int32)
    # The count-th smallest key, from its highest bit down: the largest number that fewer than count keys lie below.
    bound = tl.zeros([], tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    below = 0
    for _ in range(32):
        probe = bound | bit
        smaller = 0
        for start in range(0, width, BLOCK):
            key, free = _keys(priority, protected, start, width, BLOCK)
            smaller += tl.sum((free & (key < probe)).to(tl.int32), 0)
        if smaller < count:
            bound = probe
            below = smaller
        bit >>= 1
    # Of the keys that equal it, the first ones.
    tied = 0
    for start in range(0, width, BLOCK):
        key, free = _keys(priority, protected, start, width, BLOCK)
        equal = (free & (key == bound)).to(tl.int32)
        rank = tied + tl.cumsum(equal, 0)
        chosen = free & ((key < bound) | ((key == bound) & (rank <= count - below)))
        at = start + tl.arange(0, BLOCK)
        tl.store(victim + at, chosen, mask=at < width)
        tied += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["candidates", "n", "slots", "victims"])
def _partition(
    victim, slot, layers, lanes, order, position, count, freed, candidates, n, slots, victims,
    LANES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = row // KV_HEADS
    cell = tl.load(layers + pair) * LANES + tl.load(lanes + pair)
    full = tl.load(count + cell) == n
    base = (cell * KV_HEADS + row % KV_HEADS) * slots
    gone = 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        leaves = tl.load(victim + row * candidates + at, mask=at < candidates, other=0) != 0
        own = tl.load(slot + row * n + at, mask=inside, other=0)
        # How many victims stand before each token.
        before = gone + tl.cumsum(leaves.to(tl.int32), 0) - leaves.to(tl.int32)
        target = tl.where(leaves, n - victims + before, at - before)
        if full:
            tl.store(order + base + target, own.to(tl.int32), mask=inside)
            tl.store(position + base + own, tl.full([BLOCK], -1, tl.int32), mask=leaves)
        tl.store(freed + row * victims + before, own, mask=leaves)
        gone += tl.sum(leaves.to(tl.int32), 0)


@triton.jit(do_not_specialize=["n", "victims"])
def _count_eviction(layers, lanes, count, evictions, n, victims, LANES: tl.constexpr):
    pair = tl.program_id(0)
    cell = tl.load(layers + pair) * LANES + tl.load(lanes + pair)
    if tl.load(count + cell) == n:
        tl.store(count + cell, n - victims)
        tl.store(evictions + cell, tl.load(evictions + cell) + 1)


def lowest(priority: Tensor, protected: Tensor, count: int | Tensor) -> Tensor:
    """See ``select.lowest``: a search over the bits of order-preserving integers."""
    priority, protected = priority.contiguous(), protected.contiguous()
    width = priority.shape[-1]
    victim = torch.empty_like(protected)
    own = isinstance(count, Tensor)
    counts = count.expand(*priority.shape[:-1], 1).contiguous() if isinstance(count, Tensor) else priority
    _lowest[(priority.numel() // width,)](
        priority, protected, counts, victim, width, 0 if own else count, own, BLOCK, num_warps=8
    )
    return victim


def free(
    victim: Tensor,
    slot: Tensor,
    victims: int,
    pairs: Sequence[tuple[int, int]],
    order: Tensor,
    position: Tensor,
    count: Tensor,
    evictions: Tensor,
) -> Tensor:
    """See ``select.free``. The count is changed in a launch of its own, as all heads of a pair read it."""
    for tensor in (victim, slot, order, position, count, evictions):
        assert tensor.is_contiguous()
    layers, lanes = layers_and_lanes(pairs)
    kv_heads, n = slot.shape[1:]
    batch, slots = order.shape[1], order.shape[3]
    freed = torch.empty(len(pairs), kv_heads, victims, dtype=torch.int64, device=slot.device)
    _partition[(len(pairs) * kv_heads,)](
        victim, slot, layers, lanes, order, position, count, freed, victim.shape[-1], n, slots, victims,
        batch, kv_heads, BLOCK, num_warps=8,
    )  # fmt: skip
    _count_eviction[(len(pairs),)](layers, lanes, count, evictions, n, victims, batch, num_warps=1)
    return freed
