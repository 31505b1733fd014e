"""Attention of the window's queries over the candidates: what most policies score tokens by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks


def window_attention(
    queries: Tensor,
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    only: Tensor | None = None,
    group_max: bool = False,
) -> Tensor:
    """Mean over the queries of a = softmax over the candidates of q.k / sqrt(D), in float32.

    Args:
        queries: [L, B, Hq, w, D], 1 <= w queries in any order.
        k: [L, B, H, S, D], where slots are.
        order: int64 [P, H, c], the candidates' slots.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: heads and blocks of queries.
        only: int64 [P], the one query to use in each pair; None uses all.
        group_max: take the largest q.k over the query heads of a KV head before the softmax (R-KV's importance).

    Returns:
        float32 [P, Hq, c], or [P, H, c] with ``group_max``.
    """
    kv_heads, candidates = order.shape[1:]
    group, w = queries.shape[2] // kv_heads, 1 if only is not None else queries.shape[3]
    block = min(w, scratch.numel() // (group * candidates))
    if block == 0:
        raise MemoryError(
            f"one query over {candidates} candidates needs more than the scratch of {scratch.nbytes} bytes"
        )
    out = torch.zeros(
        len(pairs), kv_heads, 1 if group_max else group, candidates, dtype=torch.float32, device=order.device
    )
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(kv_heads, 1, k):
            keys = k[layer, lane, head].index_select(0, order[p, head]).to(torch.float32)
            own = queries[layer, lane, head * group : (head + 1) * group]  # [G, w, D]
            if only is not None:
                own = own.index_select(1, only[p : p + 1])
            own = own.to(torch.float32) * k.shape[-1] ** -0.5
            for start in blocks(w, block, k):
                rows = own[:, start : start + block]  # [G, block, D]
                logits = scratch[: rows.shape[0] * rows.shape[1] * candidates].view(*rows.shape[:2], candidates)
                torch.matmul(rows, keys.T, out=logits)
                if group_max:
                    logits = logits.amax(0, keepdim=True)
                torch.softmax(logits, -1, out=logits)
                out[p, head] += logits.sum(1)
    return out.div_(w).flatten(1, 2)
