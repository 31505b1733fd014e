"""One layer of the ring as the operations of a step see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
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
