"""One layer of the ring as the operations of a step see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class LayerRing:
    """Views of one layer's storage and tables: B lanes, H KV heads, Hq query heads, S slots, W window, D head dim."""

    k: Tensor  # [B, H, S, D]
    v: Tensor  # [B, H, S, D]
    position: Tensor  # int32 [B, H, S]; -1 is invisible
    order: Tensor  # int32 [B, H, S]; the next token goes to slot order[count]
    v_range: Tensor  # float32 [B, H, S]
    queries: Tensor  # [B, Hq, W, D]; that of position p at p mod W
    count: Tensor  # int32 [B]
    evictions: Tensor  # int32 [B]
    seen: Tensor  # int64 [B], the position of the token that the step appends
    active: Tensor  # bool [B]; nothing is written where it is False
