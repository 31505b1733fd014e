"""The account of each lane, advanced in launches of their own: nothing else reads or writes it meanwhile."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _advance(active, count, seen, lanes, cells, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    runs = tl.load(active + at % lanes, mask=at < cells, other=0) != 0
    tl.store(count + at, tl.load(count + at, mask=at < cells, other=0) + 1, mask=runs)
    first = runs & (at < lanes)  # the cells of layer 0 stand for the lanes
    tl.store(seen + at, tl.load(seen + at, mask=first, other=0) + 1, mask=first)


@triton.jit
def _commit(token, active, next_token, out, lanes, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = lane < lanes
    runs = tl.load(active + lane, mask=mask, other=0) != 0
    drawn = tl.where(runs, tl.load(token + lane, mask=mask, other=-1), -1)
    tl.store(out + lane, drawn, mask=mask)
    tl.store(next_token + lane, drawn, mask=mask)
    tl.store(active + lane, drawn >= 0, mask=mask)


def advance(active: Tensor, count: Tensor, seen: Tensor) -> None:
    """See ``advance.advance``."""
    assert count.is_contiguous()
    cells = count.numel()
    block = 256
    _advance[(triton.cdiv(cells, block),)](active, count, seen, len(seen), cells, block)


def commit(token: Tensor, active: Tensor, next_token: Tensor) -> Tensor:
    """See ``advance.commit``."""
    out = torch.empty_like(token)
    _commit[(1,)](token, active, next_token, out, len(token), triton.next_power_of_2(len(token)), num_warps=1)
    return out
