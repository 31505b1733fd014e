"""One layer of the ring as the operations of a step see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass
class LayerRing:
    """Views of one layer's storage and tables: B lanes, H KV heads, Hq query heads, S slots, W window, D head dim.

    Attributes:
        k, v: [B, H, S, D].
        position: int32 [B, H, S]; -1 is invisible.
        order: int32 [B, H, S]; the next token goes to slot order[count].
        v_range: float32 [B, H, S].
        queries: [B, Hq, W, D]; that of position p at p mod W.
        count, evictions: int32 [B].
        seen: int64 [B], the position of the token that the step appends.
        active: bool [B]; nothing is written where it is False.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    order: Tensor
    v_range: Tensor
    queries: Tensor
    count: Tensor
    evictions: Tensor
    seen: Tensor
    active: Tensor
    native: Any = field(default=None, init=False, repr=False)  # this layer as C sees it, once it was asked for
    _first: tuple[tuple[int, int, int], tuple[Tensor, ...]] = field(default=((0, 0, 0), ()), init=False, repr=False)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """``k`` and ``v`` with one row a slot of a head; views, since a copy would lose what is written to it."""
        return self.k.view(-1, self.k.shape[-1]), self.v.view(-1, self.v.shape[-1])

    def first(self, start: int, end: int, span: int) -> tuple[Tensor, ...]:
        """The first ``span`` slots of lanes ``start`` to ``end``, views.

        Returns:
            Keys and values [b * H, span, D], positions [b * H, 1, span].
        """
        if self._first[0] != (start, end, span):  # the same for many steps
            heads = (end - start) * self.k.shape[1]
            tables = (self.k, self.v, self.position[..., None])
            k, v, position = (x[start:end].view(heads, *x.shape[2:])[:, :span] for x in tables)
            self._first = (start, end, span), (k, v, position.mT)
        return self._first[1]


@dataclass
class Places:
    """Where a step writes in one layer: worked out for all layers at once on the torch path. Kernels look it up.

    Attributes:
        rows: int64 [b * H], for the b running lanes the row (lane * H + head) * S + slot that each head writes.
        lanes: int64 [b], the running lanes; None when all run.
        spans: for each lane how many of the first slots may hold anything, the new token included; 0 is an idle lane.
    """

    rows: Tensor
    lanes: Tensor | None
    spans: Sequence[int]


def places(
    order: Tensor, count: Tensor, seen: Tensor, heads: int, window: int, lanes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where the step that appends token ``seen`` to the running lanes writes, in all layers.

    Args:
        order: int32 [L, B, H, S]. count: int32 [L, B]. seen: int64 [B].
        heads: Hq. window: W.
        lanes: int64 [b]; None when all run.

    Returns:
        ``Places.rows`` of each layer, int64 [L, b * H]; the rows (lane * Hq + head) * W + seen mod W that the queries
        go to, int64 [b * Hq], the same in each.
    """
    _, batch, kv_heads, slots = order.shape
    head = torch.arange(batch * kv_heads, device=order.device).view(batch, kv_heads)
    slot = order.gather(3, count[:, :, None, None].expand(-1, -1, kv_heads, 1).long())[..., 0]
    rows = head * slots + slot
    query_head = torch.arange(batch * heads, device=order.device).view(batch, heads)
    query_rows = query_head * window + (seen % window)[:, None]
    if lanes is not None:
        rows, query_rows = rows[:, lanes], query_rows[lanes]
    return rows.flatten(1), query_rows.flatten()
