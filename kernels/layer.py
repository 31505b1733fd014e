"""One layer of the ring as the operations of a step see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Places:
    """Where a step writes in one layer: worked out for all layers at once on the torch path. A kernel looks it up.

    Attributes:
        rows: int64 [b * H], for the b running lanes the row (lane * H + head) * S + slot that each head writes.
        query_rows: int64 [b * Hq], the row (lane * Hq + head) * W + seen mod W.
        lanes: int64 [b], the running lanes; None when all run.
        spans: for each lane how many of the first slots may hold anything, the new token included; 0 is an idle lane.
    """

    rows: Tensor
    query_rows: Tensor
    lanes: Tensor | None
    spans: Sequence[int]


def places(
    order: Tensor, count: Tensor, seen: Tensor, heads: int, window: int, lanes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``rows`` [L, b * H] and ``query_rows`` [b * Hq] of the step that appends token ``seen`` to the running lanes.

    Args:
        order: int32 [L, B, H, S]. count: int32 [L, B]. seen: int64 [B].
        heads: Hq. window: W.
        lanes: int64 [b]; None when all run.
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
