"""Causal attention over a whole prompt; never an n x n tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG = 4096  # tokens from which the heads are computed one by one


def nothing() -> None:
    """What is done between blocks where nobody asks for anything."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, between: Callable[[], object] = nothing
) -> Tensor:
    """softmax(q.k / sqrt(D)) v, each token over itself and those before it.

    Args:
        q: [n, Hq, D]. k, v: [n, H, D].
        scratch: float32, overwritten; compiled C works in it.
        between: called between blocks of a long prompt; may raise. No bit depends on the blocks.

    Returns:
        [n, Hq * D].
    """
    n, kv_heads = k.shape[:2]
    apart = n >= LONG and kv_heads > 1 and not q.is_cuda
    if q.is_meta:  # there SDPA would plan for n x n scores; the fused kernels make their output alone
        out = torch.empty_like(q).flatten(1)
        _ = q[:, ::kv_heads].clone() if apart else None
        return out
    if apart:
        out = q.new_empty(q.shape)
        for head, own in enumerate(out.chunk(kv_heads, 1)):
            if head:
                between()
            own.copy_(_whole(q.chunk(kv_heads, 1)[head], k[:, head : head + 1], v[:, head : head + 1]))
        return out.flatten(1)
    return _whole(q, k, v).flatten(1)


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads at once: [n, Hq, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, n, D]
    if q.device.type == "cpu":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        # The fused kernels for float32 cannot group heads; repeating one layer's keys is cheap beside n x n scores.
        if q.itemsize > 2:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # In this order: cuDNN, which torch prefers on some GPUs, makes a plan for every new length.
        fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with sdpa_kernel(fused, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
