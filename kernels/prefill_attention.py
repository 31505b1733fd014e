"""Causal attention over a whole prompt; never an n x n tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringkv.kernels.blocks import blocks

LONG = 4096  # tokens from which a CPU computes a prompt in blocks of queries and heads, for a pause now and then
QUERIES = 512  # of a block: as many as torch's kernel takes keys at once, so that no bit depends on the blocks
AT_ONCE = 1 << 31  # products of two components in a block, for each thread


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    """softmax(q.k / sqrt(D)) v, each token over itself and those before it.

    Args:
        q: [n, Hq, D]. k, v: [n, H, D].
        scratch: float32, overwritten; compiled C works in it.

    Returns:
        [n, Hq * D].
    """
    n, heads, d = q.shape
    if q.is_meta:  # there SDPA would plan for n x n scores; the fused kernels make their output alone
        _ = q[: 3 * QUERIES].clone() if n >= LONG else None  # of a block: queries and output, as they lie and turned
        return torch.empty_like(q).flatten(1)
    if n < LONG or q.is_cuda:
        return _whole(q, k, v).flatten(1)
    out, group = q.new_empty(q.shape), heads // k.shape[1]
    step = AT_ONCE * torch.get_num_threads() // (QUERIES * n * d) // group * group or 1
    for head in blocks(heads, step, q):
        own, shared = slice(head, head + step), slice(head // group, (head + step - 1) // group + 1)
        for start in blocks(n, QUERIES, q):
            end = min(start + QUERIES, n)
            # Each query sees a key more than the one before it. The last one first, a row of the mask begins one number
            # after the row before it: one row serves them all.
            row = q.new_zeros(2 * end - start - 1)
            row[end:] = -torch.inf
            mask = row.as_strided((end - start, end), (1, 1))
            out[start:end, own] = _whole(q[start:end, own].flip(0), k[:end, shared], v[:end, shared], mask).flip(0)
    return out.flatten(1)


def _whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """All heads at once: [n, Hq, D]. A mask [n, keys] is added to the scores, instead of the causal one."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, n, D]
    if q.device.type == "cpu":
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    else:
        # The fused kernels for float32 cannot group heads; repeating one layer's keys is cheap beside n x n scores.
        if q.itemsize > 2:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # In this order: cuDNN, which torch prefers on some GPUs, makes a plan for every new length.
        fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(fused, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
