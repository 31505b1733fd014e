"""Approximate leverage of tokens: how far their key and value reach under a random projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks


def leverage(
    k: Tensor, v: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor, projection: Tensor
) -> Tensor:
    """|kG|^2 * |vG|^2 in float32.

    Args:
        k, v: [L, B, H, S, D], where slots are.
        order: int64 [P, H, c], the candidates' slots.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: blocks of tokens.
        projection: float32 [P, D, r], one G for all heads of a pair.

    Returns:
        float32 [P, H, c].
    """
    rank, d = projection.shape[-1], k.shape[-1]
    block, candidates = scratch.numel() // (rank + d), order.shape[2]
    if block == 0:
        raise MemoryError(f"one token at rank {rank} needs more than the scratch of {scratch.nbytes} bytes")
    out = torch.ones(order.shape, dtype=torch.float32, device=order.device)
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(order.shape[1], 1, k):
            for storage in (k, v):
                for start in blocks(candidates, block, k):
                    slots, reached = (x[p, head, start : start + block] for x in (order, out))
                    rows = storage[layer, lane, head].index_select(0, slots).to(torch.float32)  # [block, D]
                    projected = scratch[: len(slots) * rank].view(-1, rank)
                    torch.matmul(rows, projection[p], out=projected)
                    reached *= projected.square_().sum(-1)
    return out
