"""Split a fused qkv projection into heads; q/k norm and rotary embedding on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringkv.kernels.norm import rms_norm


@dataclass
class Angles:
    """Rotary angles of n tokens."""

    cos: Tensor  # float32 [n, D/2]
    sin: Tensor  # float32 [n, D/2]

    @cached_property
    def paired(self) -> tuple[Tensor, Tensor]:
        """Factors of (first, second) and of (second, first) half of a head: [n, 1, 1, D/2] and [n, 1, 2, D/2]."""
        return self.cos[:, None, None], torch.stack((-self.sin, self.sin), -2)[:, None]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of x [n, heads, D] in the half-split layout."""
    own, other = angles.paired
    halves = x.view(*x.shape[:-1], 2, -1)
    out = halves * own  # float32 at least
    return out.add_(halves.flip(-2).to(out.dtype).mul_(other)).view(x.shape).to(x.dtype)


def split_rotate(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys after norm and RoPE, and values, of a fused projection.

    Args:
        qkv: [n, (heads + 2 * kv_heads) * D].
        norms: the weights [D] of the query and the key norm, or None.

    Returns:
        q [n, heads, D], k [n, kv_heads, D], v [n, kv_heads, D].
    """
    split = torch.split_with_sizes  # Tensor.split takes longer than what it is for
    both, v = split(qkv.view(len(qkv), heads + 2 * kv_heads, -1), (heads + kv_heads, kv_heads), 1)
    if norms is None:
        q, k = split(rotate(both, angles), (heads, kv_heads), 1)
    else:
        q, k = split(both, (heads, kv_heads), 1)
        q, k = rotate(rms_norm(q, norms[0], eps), angles), rotate(rms_norm(k, norms[1], eps), angles)
    return q, k, v
