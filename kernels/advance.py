"""What a step changes of each lane's account, apart from all that reads it."""

from __future__ import annotations

from torch import Tensor


def advance(active: Tensor, count: Tensor, seen: Tensor) -> None:
    """Count the token that every active lane has appended, in place.

    Args:
        active: bool [B]. count: int32 [L, B]. seen: int64 [B].
    """
    count += active
    seen += active


def commit(token: Tensor, active: Tensor, next_token: Tensor) -> Tensor:
    """Hand the drawn tokens to the next step, in place; a lane whose row was not finite runs no further.

    Args:
        token: int64 [B], -1 where the logits were not finite. active: bool [B]. next_token: int64 [B].

    Returns:
        int64 [B], -1 for a lane that does not run.
    """
    next_token.copy_(token.where(active, -1))
    active &= token >= 0
    return next_token.clone()
