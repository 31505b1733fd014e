"""Forced tokens: a queue a lane that replaces what was drawn, and the thought budget that starts it."""

from __future__ import annotations

import torch
from torch import Tensor

BEFORE, INSIDE, AFTER = 0, 1, 2  # phases of a text with a thought
IDLE, NEXT = -1, -2  # cursors: nothing is forced; forcing starts after one more token of the model's


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
    """Replace drawn tokens by forced ones where a queue runs, and account for the thought, in place.

    Args:
        token: int64 [B], as drawn; -1 (a row that was not finite) passes.
        queue: int64 [B, M], what closes a thought: the message and the close id. length: int64 [B], used of it.
        cursor: int64 [B], the next of the queue, or IDLE or NEXT.
        left: int64 [B], thought tokens that the budget still allows; negative is no budget.
        phase: int64 [B], BEFORE, INSIDE or AFTER the thought.
        open_id, close_id: the tags of the thought; -1 where the model has none.

    Returns:
        The tokens that follow, int64 [B], and which of them were forced, bool [B].
    """
    forcing = (cursor >= 0) & (token >= 0)
    token = torch.where(forcing, queue.gather(1, cursor.clamp(min=0)[:, None])[:, 0], token)
    after = torch.where(forcing, cursor + 1, torch.where(cursor == NEXT, 0, cursor))
    after = torch.where(after == length, IDLE, after)

    opened = (phase == BEFORE) & (token == open_id)
    closed = (phase == INSIDE) & (token == close_id)
    counted = (phase == INSIDE) & ~closed & (token != open_id) & ~forcing & (left > 0)
    left -= counted.to(left.dtype)
    phase.copy_(torch.where(opened, INSIDE, torch.where(closed, AFTER, phase)))
    # The model may close the thought just before the queue would: then there is nothing to force any more.
    after = torch.where(closed, IDLE, after)
    cursor.copy_(torch.where((phase == INSIDE) & (left == 0) & (after == IDLE), 0, after))
    return token, forcing
