"""Blocks: what of a long tensor is computed at once."""

from __future__ import annotations

from torch import Tensor


def blocks(n: int, size: int, like: Tensor) -> range:
    """Where the blocks of ``size`` of n rows begin.

    On the meta device, where memory is counted and nothing is computed, the first two stand for all: while a block is
    computed there is at most what is left of the one before it. So a count takes no time that grows with n.
    """
    return range(0, min(n, 2 * size) if like.is_meta else n, size)
