"""Victim selection: the lowest priorities, the older first among equals, protected slots left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.pairs import layers_and_lanes


def lowest(priority: Tensor, protected: Tensor, count: int | Tensor) -> Tensor:
    """Mark the ``count`` candidates of lowest priority in every row.

    Args:
        priority: float32 [..., c], candidates in position order. NaN counts as -inf; -0.0 equals 0.0.
        protected: bool [..., c], never chosen. At least ``count`` of a row must be unprotected.
        count: victims a row, or int64 [..., 1], its own for every row.

    Returns:
        bool [..., c], True for a victim.
    """
    # +inf is the caller's highest priority; protection lies above it.
    key = torch.where(priority.isnan(), -torch.inf, priority).clamp(max=torch.finfo(torch.float32).max)
    key = key.masked_fill(protected, torch.inf)
    oldest_first = torch.sort(key, dim=-1, stable=True).indices
    chosen = torch.arange(key.shape[-1], device=key.device) < count
    return torch.zeros_like(protected).scatter_(-1, oldest_first, chosen.expand_as(protected))


def partition(victim: Tensor) -> Tensor:
    """The stable partition of 0 .. n-1 into what is kept, then the victims: int64 [..., n] for a mask [..., n]."""
    return torch.sort(victim.to(torch.int8), dim=-1, stable=True).indices


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
    """Free the victims' slots: they leave ``order``'s live part and lose their position marks, in place.

    Args:
        victim: bool [P, H, c], ``victims`` in every row. The tokens behind the c candidates are all kept.
        slot: int64 [P, H, n], the live slots of each pair in position order.
        pairs: the P (layer, lane) that the rows belong to.
        order, position: int32 [L, B, H, S]. count, evictions: int32 [L, B].

    Returns:
        int64 [P, H, victims], the slots that are free now.

    A pair whose ``count`` is not n is left alone: the device has the last word on what is full.
    """
    (layer, lane), n = layers_and_lanes(pairs), slot.shape[-1]
    kept = torch.zeros_like(victim[..., :1]).expand(*victim.shape[:2], n - victim.shape[-1])
    moved = slot.gather(2, partition(torch.cat((victim, kept), dim=-1)))
    full = count[layer, lane] == n
    freed = moved[..., n - victims :]
    marks = position[layer, lane]
    position[layer, lane] = torch.where(full[:, None, None], marks.scatter(2, freed, -1), marks)
    live = order[layer, lane, :, :n]
    order[layer, lane, :, :n] = torch.where(full[:, None, None], moved.to(order.dtype), live)
    count[layer, lane] -= full * victims
    evictions[layer, lane] += full.to(evictions.dtype)
    return freed
