"""A step in one layer: write the token, and attend to what is visible."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.append import append
from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles


def attend(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, ring: LayerRing) -> Tensor:
    """``append`` one token a lane, then ``decode_attention``.

    Args:
        qkv, norms, eps, angles, ring: see ``append``.

    Returns:
        [B, Hq * D]; zeros for an idle lane.
    """
    return decode_attention(append(qkv, norms, eps, angles, ring), ring).flatten(1)


def decode_attention(q: Tensor, ring: LayerRing) -> Tensor:
    """softmax(q.k / sqrt(D)) v over the slots whose position is not -1. Slots are in no order, and need none.

    Args:
        q: [B, Hq, D], after norm and RoPE.
        ring: the layer, this step's token written, not yet counted.

    Returns:
        [B, Hq, D]; zeros for an idle lane.
    """
    grouped = q.unflatten(1, (ring.k.shape[1], -1))  # [B, H, G, D]
    visible = (ring.position >= 0)[:, :, None]  # [B, H, 1, S]
    out = F.scaled_dot_product_attention(grouped, ring.k, ring.v, attn_mask=visible)
    return out.where(ring.active[:, None, None, None], 0.0).flatten(1, 2)
