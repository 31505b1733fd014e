"""Write one token a lane into a layer of the ring."""

from __future__ import annotations

import torch
from torch import Tensor


def append(
    rows: Tensor,
    query_rows: Tensor,
    lanes: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    v_range: Tensor,
    queries: Tensor,
) -> None:
    """Scatter keys, values, value ranges and queries to their slots, in place.

    Args:
        rows: int64 [b * H], for the b running lanes the row (lane * H + head) * S + slot that each head writes.
        query_rows: int64 [b * Hq], the row (lane * Hq + head) * W + seen mod W.
        lanes: int64 [b], the running lanes, or None when all run. Nothing of another lane is written.
        q: [B, Hq, D]. k, v: [B, H, D].
        ring_k, ring_v: [B, H, S, D]. v_range: float32 [B, H, S]. queries: [B, Hq, W, D]. One layer of each.
    """
    if lanes is not None:
        q, k, v = q[lanes], k[lanes], v[lanes]
    _rows(ring_k).index_copy_(0, rows, k.flatten(0, 1).to(ring_k.dtype))
    stored = v.flatten(0, 1).to(ring_v.dtype)
    _rows(ring_v).index_copy_(0, rows, stored)
    v_range.view(-1).index_copy_(0, rows, value_range(stored))
    _rows(queries).index_copy_(0, query_rows, q.flatten(0, 1).to(queries.dtype))


def value_range(v: Tensor) -> Tensor:
    """max - min of each value vector: [..., D] -> float32 [...]."""
    low, high = torch.aminmax(v.to(torch.float32), dim=-1)
    return high - low


def _rows(cache: Tensor) -> Tensor:
    """All vectors of a cache as rows of a view: a copy here would lose the write, so ``view`` and never ``reshape``."""
    return cache.view(-1, cache.shape[-1])
