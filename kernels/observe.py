"""Attention that live tokens get from queries, summed over the queries: what H2O and G-KV rank tokens by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks


def received_attention(
    queries: Tensor,
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    position: Tensor,
    query_position: Tensor,
    since: Tensor,
    group_max: bool = False,
) -> Tensor:
    """Sum over the queries of softmax over the keys up to the query's position of q.k / sqrt(D), in float32.

    Args:
        queries: [L, B, Hq, w, D], in any order.
        k: [L, B, H, S, D], where slots are.
        order: int64 [P, H, n], the slots of all live keys.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: blocks of queries.
        position: int64 [P, H, n], of the keys in ``order``.
        query_position: int64 [P, w], of the queries.
        since: int64 [P]; queries at positions below it do not count.
        group_max: take the largest over the query heads of a KV head, for each query, instead of their mean.

    Returns:
        float32 [P, H, n], the mean over the query heads of each KV head, or the sum of the largest.
    """
    kv_heads, n = order.shape[1:]
    group, w = queries.shape[2] // kv_heads, queries.shape[3]
    block = min(w, scratch.numel() // (group * n))
    if block == 0:
        raise MemoryError(f"one query over {n} keys needs more than the scratch of {scratch.nbytes} bytes")
    ignored = query_position < since[:, None]  # [P, w]
    out = torch.zeros(order.shape, dtype=torch.float32, device=order.device)
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(kv_heads, 1, k):
            keys = k[layer, lane, head].index_select(0, order[p, head]).to(torch.float32)
            own = queries[layer, lane, head * group : (head + 1) * group]  # [G, w, D]
            for start in blocks(w, block, k):
                rows = own[:, start : start + block].to(torch.float32) * k.shape[-1] ** -0.5  # [G, block, D]
                logits = scratch[: rows.shape[0] * rows.shape[1] * n].view(*rows.shape[:2], n)
                torch.matmul(rows, keys.T, out=logits)
                unseen = position[p, head] > query_position[p, start : start + block, None]  # [block, n]
                logits.masked_fill_(unseen, -torch.inf)
                torch.softmax(logits, -1, out=logits)
                # An ignored query may see nothing at all, and be NaN.
                logits.masked_fill_(ignored[p, start : start + block, None], 0.0)
                out[p, head] += logits.amax(0).sum(0) if group_max else logits.sum((0, 1))
    return out if group_max else out / group
