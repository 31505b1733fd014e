"""How much live keys resemble each other, as R-KV's published code counts it, in blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks


def redundancy(k: Tensor, order: Tensor, pairs: Sequence[tuple[int, int]], scratch: Tensor, threshold: float) -> Tensor:
    """Column means of the cosines between live keys, the last match of each row left out.

    C = cosine, the diagonal 0. In every row the match (C > threshold) of largest column is set to 0; a row without a
    match sets its column 0 instead. Each column is summed over the rows and divided by the number of keys.

    Args:
        k: [L, B, H, S, D], where slots are.
        order: int64 [P, H, n], the slots of all live keys, in position order.
        pairs: the P (layer, lane) that the rows of ``order`` belong to.
        scratch: float32, one-dimensional; bounds what is materialised at once: blocks of rows.
        threshold: cosine above which two keys match.

    Returns:
        float32 [P, H, n].
    """
    n = order.shape[-1]
    block = min(n, scratch.numel() // (2 * n))
    if block == 0:
        raise MemoryError(f"one row of {n} similarities needs more than the scratch of {scratch.nbytes} bytes")
    column = torch.arange(n, dtype=torch.float32, device=order.device)  # exact below 2^24
    out = torch.zeros(order.shape, dtype=torch.float32, device=order.device)
    for p, (layer, lane) in enumerate(pairs):
        for head in blocks(order.shape[1], 1, k):
            keys = k[layer, lane, head].index_select(0, order[p, head]).to(torch.float32)
            keys /= keys.norm(dim=-1, keepdim=True) + 1e-8
            for start in blocks(n, block, k):
                rows = keys[start : start + block]
                cosine, match = scratch[: 2 * len(rows) * n].view(2, len(rows), n)
                torch.matmul(rows, keys.T, out=cosine)
                cosine.diagonal(offset=start).zero_()
                torch.mul(cosine > threshold, column, out=match)
                # The largest matching column; without a match the maximum is 0, and so is the column.
                cosine.scatter_(1, match.amax(-1, keepdim=True).long(), 0.0)
                out[p, head] += cosine.sum(0)
    return out / n
