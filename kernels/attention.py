"""Decode attention: one query a lane over the slots of a ring that are visible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_attention(q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Sequence[int]) -> Tensor:
    """softmax(q.k / sqrt(D)) v over the slots whose position is not -1. Slots are in no order, and need none.

    Args:
        q: [B, Hq, D], after norm and RoPE.
        k, v: [B, H, S, D], one layer of the ring.
        position: int32 [B, H, S]; -1 is invisible.
        spans: for each lane how many of the first slots may hold anything; 0 is an idle lane. A lane is sliced to its
            own span, so what it computes does not depend on its neighbours.

    Returns:
        [B, Hq, D]; zeros for an idle lane.
    """
    lanes, kv_heads = k.shape[:2]
    grouped = q.unflatten(1, (kv_heads, -1))  # [B, H, G, D]
    outs = [
        F.scaled_dot_product_attention(
            grouped[b, None],
            k[b, None, :, :span],
            v[b, None, :, :span],
            attn_mask=(position[b, :, :span] >= 0)[None, :, None],
        )
        if span
        else torch.zeros_like(grouped[b, None])
        for b, span in enumerate(spans)
    ]
    return (outs[0] if lanes == 1 else torch.cat(outs)).flatten(1, 2)
