"""Norm and rotate the heads of one token a lane, and write them into a layer of the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.kernels.backend import dispatched
from ringkv.kernels.layer import LayerRing, Places
from ringkv.kernels.rotate import Angles, split_rotate


@dispatched
def append(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: Angles,
    ring: LayerRing,
    at: Places | None,
) -> Tensor:
    """Write a step's keys, values, value ranges and queries to their slots, in place; return the queries.

    Args:
        qkv: [B, (Hq + 2H) * D], the fused projection, in the ring's dtype.
        norms: the weights [D] of the query and the key norm, or None.
        eps: of these norms.
        angles: of position ``ring.seen``, [B, D/2].
        ring: the layer. Nothing of a lane that is not active is written.
        at: where to write. The twin needs it, and writes keys and values alone: position marks come before all layers
            and ``record`` after them, since one write then serves all. No kernel needs it.

    Returns:
        [B, Hq, D] after norm and RoPE; undefined for a lane that is not active.
    """
    assert at is not None
    q, k, v = split_rotate(qkv, norms, eps, angles, ring.queries.shape[1], ring.k.shape[1])
    if at.lanes is not None:
        k, v = k[at.lanes], v[at.lanes]
    k_rows, v_rows = ring.rows
    k_rows.index_copy_(0, at.rows, k.flatten(0, 1))
    v_rows.index_copy_(0, at.rows, v.flatten(0, 1))
    return q


def record(
    q: Tensor, v: Tensor, v_range: Tensor, queries: Tensor, rows: Tensor, query_rows: Tensor, lanes: Tensor | None
) -> None:
    """The rest of what a step writes on the torch path, for all layers at once: queries and value ranges.

    Args:
        q: [L, B, Hq, D], what ``append`` returned.
        v: [L, B, H, S, D]. v_range: float32 [L, B, H, S]. queries: [L, B, Hq, W, D]. The latter two are written.
        rows, query_rows: see ``places``. lanes: int64 [b], the running ones; None when all run.
    """
    layers, d = len(q), q.shape[-1]
    q = q if lanes is None else q[:, lanes]
    queries.view(layers, -1, d).index_copy_(1, query_rows, q.flatten(1, 2))
    stored = v.view(layers, -1, d).gather(1, rows[..., None].expand(-1, -1, d))
    v_range.view(layers, -1).scatter_(1, rows, value_range(stored))


def value_range(v: Tensor) -> Tensor:
    """max - min of each value vector: [..., D] -> float32 [...]."""
    wide = v.to(torch.float32)
    return wide.amax(-1) - wide.amin(-1)  # aminmax wakes torch's threads even for a few rows
