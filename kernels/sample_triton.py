"""Token sampling: a few passes over the vocabulary, each split over programs, that hand on sums and histograms."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels.sample import GREEDY_BELOW, Filters

BLOCK = 2048
_BITS = tl.constexpr(11)  # of a digit of the radix search
_BINS = tl.constexpr(1 << 11)
_LEVELS = tl.constexpr(3)
_COLDEST = tl.constexpr(GREEDY_BELOW)
_ONE = tl.constexpr(float(1 << 40))  # probabilities are summed as integers of 2^-40


@triton.jit
def _total(parts, row, blocks, COLUMNS: tl.constexpr):
    """The sum of a row's parts, one from each block of the vocabulary."""
    at = tl.arange(0, COLUMNS)
    return tl.sum(tl.load(parts + row * blocks + at, mask=at < blocks, other=0), 0)


@triton.jit
def _greatest(best, row, blocks, COLUMNS: tl.constexpr):
    at = tl.arange(0, COLUMNS)
    return tl.max(tl.load(best + row * blocks + at, mask=at < blocks, other=float("-inf")), 0)


@triton.jit
def _fixed(p):
    return (p.to(tl.float64) * _ONE).to(tl.int64)


@triton.jit
def _tops(logits, best, place, width, stride, blocks, BLOCK: tl.constexpr):
    """Each block's largest logit and its first place; +inf stands for a block that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    top = tl.max(value, 0)
    tl.store(best + row * blocks + tl.program_id(1), top)
    tl.store(place + row * blocks + tl.program_id(1), tl.min(tl.where((value == top) & (at < width), at, width), 0))


@triton.jit
def _weights(
    logits, temperature, best, p, sums, width, stride, blocks, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """exp((logit - top) / temperature), and each block's sum of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = _greatest(best, row, blocks, COLUMNS)
    value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf"))
    value = tl.exp((value - top) / tl.maximum(tl.load(temperature + row), _COLDEST))
    # A row that is not finite draws nothing; it stays clear of NaN.
    value = tl.where(tl.abs(top) < float("inf"), value, tl.where(at == 0, 1.0, 0.0))
    value = tl.where(at < width, value, 0.0)
    tl.store(p + row * width + at, value, mask=at < width)
    tl.store(sums + row * blocks + tl.program_id(1), tl.sum(value, 0))


@triton.jit
def _off(limit, row, NUCLEUS: tl.constexpr):
    """Whether a lane leaves this filter out."""
    value = tl.load(limit + row)
    return value >= 1.0 if NUCLEUS else value <= 0


@triton.jit
def _search(limit, histograms, row, width, NUCLEUS: tl.constexpr, LEVEL: tl.constexpr):
    """Of the last value that is needed, the first LEVEL digits, and what its ties must still bring."""
    digit = tl.arange(0, _BINS)
    prefix = tl.zeros([], tl.int32)
    missing = tl.zeros([], tl.int64)
    for level in tl.static_range(LEVEL):
        weight = tl.load(histograms + (row * _LEVELS + level) * _BINS + digit)
        if level == 0:
            if NUCLEUS:
                wanted = tl.ceil(tl.load(limit + row).to(tl.float64) * tl.sum(weight, 0).to(tl.float64)).to(tl.int64)
                missing = tl.maximum(wanted, 1)
            else:
                missing = tl.minimum(tl.load(limit + row), width).to(tl.int64)
        above = tl.cumsum(weight, 0, reverse=True)
        chosen = tl.sum((above >= missing).to(tl.int32), 0) - 1
        missing -= tl.sum(tl.where(digit == chosen, above - weight, 0), 0)
        prefix = (prefix << _BITS) | chosen
    return prefix, missing


@triton.jit
def _digit(
    p, scale, limit, histograms, width, blocks,
    NUCLEUS: tl.constexpr, LEVEL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Histogram of one digit of the probabilities that share the digits found so far."""
    row = tl.program_id(0).to(tl.int64)
    if _off(limit, row, NUCLEUS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(p + row * width + at, mask=at < width, other=0.0) / _total(scale, row, blocks, COLUMNS)
    prefix, _ = _search(limit, histograms, row, width, NUCLEUS, LEVEL)
    key = share.to(tl.int32, bitcast=True)
    shift: tl.constexpr = _BITS * (_LEVELS - 1 - LEVEL)
    inside = (at < width) & (((key >> shift) >> _BITS) == prefix)
    cell = histograms + (row * _LEVELS + LEVEL) * _BINS + ((key >> shift) & (_BINS - 1))
    if NUCLEUS:
        weight = _fixed(share)
        tl.atomic_add(cell, weight, mask=inside & (weight > 0), sem="relaxed")
    else:
        tl.atomic_add(cell, tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _ties(
    p, scale, limit, histograms, ties, width, blocks, NUCLEUS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """How many of each block equal the last value that is needed."""
    row = tl.program_id(0).to(tl.int64)
    if _off(limit, row, NUCLEUS):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(p + row * width + at, mask=at < width, other=0.0) / _total(scale, row, blocks, COLUMNS)
    last, _ = _search(limit, histograms, row, width, NUCLEUS, _LEVELS)
    equal = (at < width) & (share.to(tl.int32, bitcast=True) == last)
    tl.store(ties + row * blocks + tl.program_id(1), tl.sum(equal.to(tl.int32), 0))


@triton.jit
def _keep(
    p, scale, limit, histograms, ties, sums, width, blocks,
    NUCLEUS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zero what the filter leaves out; of the ties those are kept before which the weight still falls short."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(p + row * width + at, mask=at < width, other=0.0) / _total(scale, row, blocks, COLUMNS)
    left = tl.where(block == 0, 1.0, 0.0)  # sums to 1: a lane without this filter is not scaled again
    if _off(limit, row, NUCLEUS) == 0:
        last, missing = _search(limit, histograms, row, width, NUCLEUS, _LEVELS)
        key = share.to(tl.int32, bitcast=True)
        equal = ((at < width) & (key == last)).to(tl.int32)
        column = tl.arange(0, COLUMNS)
        earlier = tl.sum(tl.load(ties + row * blocks + column, mask=column < block, other=0), 0)
        before = (earlier + tl.cumsum(equal, 0) - equal).to(tl.int64)
        if NUCLEUS:
            before *= _fixed(share)
        share = tl.where((key > last) | ((equal != 0) & (before < missing)), share, 0.0)
        if not NUCLEUS:
            left = tl.sum(share, 0)
    tl.store(p + row * width + at, share, mask=at < width)
    tl.store(sums + row * blocks + block, left)


@triton.jit
def _surviving(p, top, scale, min_p, row, at, width, MIN_P: tl.constexpr):
    """Probabilities in fixed point after the last filter; ``top`` is the largest of them."""
    share = tl.load(p + row * width + at, mask=at < width, other=0.0) / scale
    if MIN_P:
        share = tl.where(share >= tl.load(min_p + row) * top, share, 0.0)
    return _fixed(share)


@triton.jit
def _masses(
    p, tops, scale, min_p, masses, width, blocks, MIN_P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    top = tl.load(tops + row)
    mass = _surviving(p, top, _total(scale, row, blocks, COLUMNS), min_p, row, at, width, MIN_P)
    tl.store(masses + row * blocks + tl.program_id(1), tl.sum(mass, 0))


@triton.jit
def _largest(p, scale, best, place, tops, width, blocks, COLUMNS: tl.constexpr):
    """The largest probability of a row: that of its largest logit, which no filter leaves out."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    value = tl.load(best + row * blocks + at, mask=at < blocks, other=float("-inf"))
    token = tl.load(place + row * blocks + at, mask=at < blocks, other=width)
    token = tl.minimum(tl.min(tl.where(value == tl.max(value, 0), token, width), 0), width - 1)
    tl.store(tops + row, tl.load(p + row * width + token) / _total(scale, row, blocks, COLUMNS))


@triton.jit
def _draw(
    p, tops, scale, min_p, masses, best, place, temperature, uniform, out, width, blocks,
    DRAWS: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The inverse of the cumulative distribution in id order; the argmax where a lane is greedy."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < blocks
    value = tl.load(best + row * blocks + column, mask=inside, other=float("-inf"))
    top = tl.max(value, 0)
    token = tl.min(tl.where(value == top, tl.load(place + row * blocks + column, mask=inside, other=width), width), 0)
    if DRAWS:  # noqa: SIM102 - a constant, decided when compiling
        if tl.load(temperature + row) >= _COLDEST:
            mass = tl.load(masses + row * blocks + column, mask=inside, other=0)
            target = (tl.load(uniform + row).to(tl.float64) * tl.sum(mass, 0).to(tl.float64)).to(tl.int64)
            until = tl.cumsum(mass, 0)
            block = tl.minimum(tl.sum(((until <= target) & inside).to(tl.int32), 0), blocks - 1)
            target -= tl.sum(tl.where(column < block, mass, 0), 0)
            at = block * BLOCK + tl.arange(0, BLOCK)
            own = _surviving(p, tl.load(tops + row), _total(scale, row, blocks, COLUMNS), min_p, row, at, width, MIN_P)
            token = block * BLOCK + tl.sum((tl.cumsum(own, 0) <= target).to(tl.int32), 0)
    tl.store(out + row, tl.where(tl.abs(top) < float("inf"), token, -1).to(tl.int64))


def sample(logits: Tensor, filters: Filters | None, uniform: Tensor | None) -> Tensor:
    """See ``sample.sample``."""
    assert logits.stride(1) == 1
    rows, width = logits.shape
    stride, blocks, device = logits.stride(0), triton.cdiv(width, BLOCK), logits.device
    columns = triton.next_power_of_2(blocks)
    grid = (rows, blocks)

    def parts(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, blocks, dtype=dtype, device=device)

    best, place = parts(torch.float32), parts(torch.int32)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    _tops[grid](logits, best, place, width, stride, blocks, BLOCK)
    if filters is None or uniform is None:
        _draw[(rows,)](
            best, best, best, best, best, best, place, best, best, out, width, blocks, False, False, BLOCK, columns
        )
        return out
    p, scale = torch.empty(rows, width, dtype=torch.float32, device=device), parts(torch.float32)
    _weights[grid](logits, filters.temperature, best, p, scale, width, stride, blocks, BLOCK, columns)
    for limit, nucleus in ((filters.top_k, False), (filters.top_p, True)):
        if limit is not None:
            histograms = torch.zeros(rows, 3, 1 << 11, dtype=torch.int64, device=device)
            for level in range(3):
                _digit[grid](p, scale, limit, histograms, width, blocks, nucleus, level, BLOCK, columns)
            ties, sums = parts(torch.int32), parts(torch.float32)
            _ties[grid](p, scale, limit, histograms, ties, width, blocks, nucleus, BLOCK, columns)
            _keep[grid](p, scale, limit, histograms, ties, sums, width, blocks, nucleus, BLOCK, columns)
            scale = sums
    masses, tops, min_p = parts(torch.int64), torch.empty(rows, dtype=torch.float32, device=device), filters.min_p
    _largest[(rows,)](p, scale, best, place, tops, width, blocks, columns)
    _masses[grid](p, tops, scale, min_p, masses, width, blocks, min_p is not None, BLOCK, columns)
    _draw[(rows,)](
        p, tops, scale, min_p, masses, best, place, filters.temperature, uniform, out, width, blocks,
        True, min_p is not None, BLOCK, columns,
    )  # fmt: skip
    return out
