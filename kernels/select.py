"""Victim selection: the lowest priorities, the older first among equals, protected slots left out."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(priority: Tensor, protected: Tensor, count: int) -> Tensor:
    """Mark the ``count`` candidates of lowest priority in every row.

    Args:
        priority: float32 [..., c], candidates in position order. NaN counts as -inf; -0.0 equals 0.0.
        protected: bool [..., c], never chosen. At least ``count`` of a row must be unprotected.
        count: victims a row.

    Returns:
        bool [..., c], True for a victim.
    """
    # +inf is the caller's highest priority; protection lies above it.
    key = torch.where(priority.isnan(), -torch.inf, priority).clamp(max=torch.finfo(torch.float32).max)
    key = key.masked_fill(protected, torch.inf)
    oldest_first = torch.sort(key, dim=-1, stable=True).indices[..., :count]
    return torch.zeros_like(protected).scatter_(-1, oldest_first, True)


def partition(victim: Tensor) -> Tensor:
    """The stable partition of 0 .. n-1 into what is kept, then the victims: int64 [..., n] for a mask [..., n]."""
    return torch.sort(victim.to(torch.int8), dim=-1, stable=True).indices
