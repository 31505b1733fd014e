"""Decode attention: one query a lane over the slots of a ring that are visible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

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
            neighbours. Kernels work them out from ``count`` and ``evictions``.

    Returns:
        [B, Hq, D]; zeros for an idle lane.
    """
    assert at is not None
    # Of one KV head a lane alone would be a batch of one, whose last bits differ from those in a larger batch.
    if q.dtype not in (torch.float32, torch.float64) or ring.k.shape[1] == 1:
        return _fused(q, ring, at.spans)
    outs, start = [], 0
    for span, same in groupby(at.spans):
        end = start + len(list(same))
        outs.append(_products(q[start:end], ring, start, end, span) if span else torch.zeros_like(q[start:end]))
        start = end
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _products(q: Tensor, ring: LayerRing, start: int, end: int, span: int) -> Tensor:
    """Of neighbouring lanes with one span, as two batched products: for a token a lane, faster than SDPA on a CPU."""
    keys, values, position = ring.first(start, end, span)
    hidden = position.clamp(max=0) * 1e38  # 0, or so low that it does not count
    grouped = q.reshape(len(keys), -1, q.shape[-1])
    scores = torch.baddbmm(hidden.to(q.dtype), grouped, keys.mT, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), values).view(q.shape)


def _fused(q: Tensor, ring: LayerRing, spans: Sequence[int]) -> Tensor:
    """Lane by lane, by torch's own attention, which keeps the scores of half precision in float32."""
    grouped = q.unflatten(1, (ring.k.shape[1], -1))  # [B, H, G, D]
    outs = [
        F.scaled_dot_product_attention(
            grouped[b, None],
            ring.k[b, None, :, :span],
            ring.v[b, None, :, :span],
            attn_mask=(ring.position[b, :, :span] >= 0)[None, :, None],
        )
        if span
        else torch.zeros_like(grouped[b, None])
        for b, span in enumerate(spans)
    ]
    return (outs[0] if len(spans) == 1 else torch.cat(outs)).flatten(1, 2)
