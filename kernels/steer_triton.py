"""Forced tokens and thought budgets: the whole of a lane's rule in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringkv.kernels import steer as rule

_BEFORE, _INSIDE, _AFTER = tl.constexpr(rule.BEFORE), tl.constexpr(rule.INSIDE), tl.constexpr(rule.AFTER)
_IDLE, _NEXT = tl.constexpr(rule.IDLE), tl.constexpr(rule.NEXT)


@triton.jit
def _steer(
    token, queue, length, cursor, left, phase, out, forced, open_id, close_id, lanes, width, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    mask = lane < lanes
    drawn = tl.load(token + lane, mask=mask, other=-1)
    at = tl.load(cursor + lane, mask=mask, other=_IDLE)
    budget = tl.load(left + lane, mask=mask, other=-1)
    where = tl.load(phase + lane, mask=mask, other=_AFTER)

    forcing = (at >= 0) & (drawn >= 0)
    drawn = tl.where(forcing, tl.load(queue + lane * width + at, mask=mask & forcing, other=0), drawn)
    after = tl.where(forcing, at + 1, tl.where(at == _NEXT, 0, at))
    after = tl.where(after == tl.load(length + lane, mask=mask, other=0), _IDLE, after)

    opened = (where == _BEFORE) & (drawn == open_id)
    closed = (where == _INSIDE) & (drawn == close_id)
    counted = (where == _INSIDE) & (drawn != close_id) & (drawn != open_id) & (forcing == 0) & (budget > 0)
    budget -= counted.to(tl.int64)
    where = tl.where(opened, _INSIDE, tl.where(closed, _AFTER, where))
    after = tl.where(closed, _IDLE, after)
    after = tl.where((where == _INSIDE) & (budget == 0) & (after == _IDLE), 0, after)

    tl.store(out + lane, drawn, mask=mask)
    tl.store(forced + lane, forcing, mask=mask)
    tl.store(left + lane, budget, mask=mask)
    tl.store(phase + lane, where, mask=mask)
    tl.store(cursor + lane, after, mask=mask)


def steer(
    token: Tensor,
    queue: Tensor,
    length: Tensor,
    cursor: Tensor,
    left: Tensor,
    phase: Tensor,
    open_id: int,
    close_id: int,
) -> tuple[Tensor, Tensor]:
    """See ``steer.steer``."""
    assert queue.is_contiguous()
    out, forced = torch.empty_like(token), torch.empty(len(token), dtype=torch.bool, device=token.device)
    _steer[(1,)](
        token, queue, length, cursor, left, phase, out, forced, open_id, close_id, len(token), queue.shape[1],
        triton.next_power_of_2(len(token)), num_warps=1,
    )  # fmt: skip
    return out, forced
