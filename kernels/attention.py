"""Decode attention: one query a lane over the slots of a ring that are visible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.backend import dispatched
from ringkv.kernels.layer import LayerRing, Places


@dispatched
def decode_attention(q: Tensor, ring: LayerRing, at: Places | None) -> Tensor:
    """softmax(q.k / sqrt(D)) v over the slots whose position is not -1. Slots are in no order, and need none.

    Args:
        q: [B, Hq, D], after norm and RoPE.
        ring: the layer, this step's token written, not yet counted.
        at: its spans are what the twin slices each lane to, so that what it computes does not depend on its
            neighbours. The kernel works them out from ``count`` and ``evictions``.

    Returns:
        [B, Hq, D]; zeros for an idle lane.
    """
    assert at is not None
    lanes, kv_heads = ring.k.shape[:2]
    grouped = q.unflatten(1, (kv_heads, -1))  # [B, H, G, D]
    outs = [
        F.scaled_dot_product_attention(
            grouped[b, None],
            ring.k[b, None, :, :span],
            ring.v[b, None, :, :span],
            attn_mask=(ring.position[b, :, :span] >= 0)[None, :, None],
        )
        if span
        else torch.zeros_like(grouped[b, None])
        for b, span in enumerate(at.spans)
    ]
    return (outs[0] if lanes == 1 else torch.cat(outs)).flatten(1, 2)
