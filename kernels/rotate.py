"""Split a fused qkv projection into heads; q/k norm and rotary embedding on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.kernels.norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout.

    Args:
        x: [..., heads, D].
        cos, sin: [..., D/2] float32, one row a token, without the head axis.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_rotate(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys after norm and RoPE, and values, of a fused projection.

    Args:
        qkv: [n, (heads + 2 * kv_heads) * D].
        norms: the weights [D] of the query and the key norm, or None.
        cos, sin: [n, D/2] float32.

    Returns:
        q [n, heads, D], k [n, kv_heads, D], v [n, kv_heads, D].
    """
    qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    if norms is None:
        q, k = rotate(qkv[..., : heads + kv_heads, :], cos, sin).split((heads, kv_heads), dim=-2)
    else:
        q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=-2)
        q = rotate(rms_norm(q, norms[0], eps), cos, sin)
        k = rotate(rms_norm(k, norms[1], eps), cos, sin)
    return q, k, qkv[..., heads + kv_heads :, :]
