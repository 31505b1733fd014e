"""Norm and rotate the heads of one token a lane, and write them into a layer of the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.kernels.backend import dispatched
from ringkv.kernels.layer import LayerRing, Places
from ringkv.kernels.rotate import split_rotate


@dispatched
def append(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    ring: LayerRing,
    at: Places | None,
) -> Tensor:
    """Write a step's keys, values, value ranges and queries to their slots, in place; return the queries.

    Args:
        qkv: [B, (Hq + 2H) * D], the fused projection.
        norms: the weights [D] of the query and the key norm, or None.
        eps: of these norms.
        cos, sin: [B, D/2] float32, the angles of position ``ring.seen``.
        ring: the layer. Nothing of a lane that is not active is written.
        at: where to write. The twin needs it, and leaves the position marks to whoever made it, since one write
            then serves all layers; the kernel finds the slots and marks them itself.

    Returns:
        [B, Hq, D] after norm and RoPE; undefined for a lane that is not active.
    """
    assert at is not None
    heads, kv_heads = ring.queries.shape[1], ring.k.shape[1]
    q, k, v = split_rotate(qkv, norms, eps, cos, sin, heads, kv_heads)
    own_q = q
    if at.lanes is not None:
        own_q, k, v = q[at.lanes], k[at.lanes], v[at.lanes]
    _rows(ring.k).index_copy_(0, at.rows, k.flatten(0, 1).to(ring.k.dtype))
    stored = v.flatten(0, 1).to(ring.v.dtype)
    _rows(ring.v).index_copy_(0, at.rows, stored)
    ring.v_range.view(-1).index_copy_(0, at.rows, value_range(stored))
    _rows(ring.queries).index_copy_(0, at.query_rows, own_q.flatten(0, 1).to(ring.queries.dtype))
    return q


def value_range(v: Tensor) -> Tensor:
    """max - min of each value vector: [..., D] -> float32 [...]."""
    wide = v.to(torch.float32)
    return wide.amax(-1) - wide.amin(-1)  # aminmax wakes torch's threads even for a few rows


def _rows(cache: Tensor) -> Tensor:
    """All vectors of a cache as rows of a view: a copy here would lose the write, so ``view`` and never ``reshape``."""
    return cache.view(-1, cache.shape[-1])
