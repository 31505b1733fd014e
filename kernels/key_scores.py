"""What policies that expect queries ask of keys and values: products with vectors, and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks


def key_scores(
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    linear: Tensor,
    squared: Tensor | None = None,
    moduli: Tensor | None = None,
) -> Tensor:
    """k . linear + sum over the rows of (k . row)^2 + sum over the pairs f of |(k[f], k[f + D/2])| * moduli[f].

    Args:
        k: [L, B, H, S, D], where slots are.
        order: int64 [P, H, n], the slots of the keys.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: blocks of keys.
        linear: float32 [P, Hq, D].
        squared: float32 [P, Hq, T, D], T rows for each query head, or None.
        moduli: float32 [P, Hq, D/2], or None.

    Returns:
        float32 [P, Hq, n].
    """
    kv_heads, n = order.shape[1:]
    group, d = linear.shape[1] // kv_heads, k.shape[-1]
    rows = 0 if squared is None else group * squared.shape[2]
    block = scratch.numel() // (d + rows)
    if block == 0:
        raise MemoryError(f"one key and {rows} products need more than the scratch of {scratch.nbytes} bytes")
    out = torch.empty(len(pairs), kv_heads, group, n, dtype=torch.float32, device=order.device)
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(kv_heads, 1, k):
            own = slice(head * group, (head + 1) * group)
            for start in blocks(n, block, k):
                slots, score = order[p, head, start : start + block], out[p, head, :, start : start + block]
                keys = k[layer, lane, head].index_select(0, slots).to(torch.float32)  # [block, D]
                score.copy_(linear[p, own] @ keys.T)  # [G, block]
                if squared is not None:
                    products = scratch[: rows * len(slots)].view(rows, -1)
                    torch.matmul(squared[p, own].flatten(0, 1), keys.T, out=products)
                    score += products.square_().view(group, -1, len(slots)).sum(1)
                if moduli is not None:
                    score += moduli[p, own] @ torch.hypot(*keys.chunk(2, -1)).T
    return out.flatten(1, 2)


def lengths(x: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor) -> Tensor:
    """The Euclidean length of vectors.

    Args:
        x: [L, B, H, S, D], where slots are.
        order: int64 [P, H, n], the slots of the vectors.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: blocks of vectors.

    Returns:
        float32 [P, H, n].
    """
    block = scratch.numel() // x.shape[-1]
    if block == 0:
        raise MemoryError(f"one vector needs more than the scratch of {scratch.nbytes} bytes")
    out = torch.empty(order.shape, dtype=torch.float32, device=order.device)
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(order.shape[1], 1, x):
            for start in blocks(order.shape[2], block, x):
                slots = order[p, head, start : start + block]
                rows = x[layer, lane, head].index_select(0, slots).to(torch.float32)  # [block, D]
                torch.linalg.vector_norm(rows, dim=-1, out=out[p, head, start : start + block])
    return out
