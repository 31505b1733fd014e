"""Attention that live tokens get from queries: the window's kernels with a causal mask, summed over the head group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringkv.kernels.scores_triton import summed_attention


def received_attention(
    queries: Tensor,
    k: Tensor,
    order: Tensor,
    pairs: Sequence[tuple[int, int]],
    scratch: Tensor,
    position: Tensor,
    query_position: Tensor,
    since: Tensor,
) -> Tensor:
    """See ``observe.received_attention``."""
    share = order.shape[1] / queries.shape[2]
    causal = (position, query_position, since)
    return summed_attention(queries, k, order, pairs, scratch, share, group_sum=True, causal=causal)
