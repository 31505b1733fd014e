"""Attention that live tokens get from queries: the window's kernels with a causal mask, for a head group together."""

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
    group_max: bool = False,
) -> Tensor:
    """See ``observe.received_attention``."""
    share = 1.0 if group_max else order.shape[1] / queries.shape[2]
    causal = (position, query_position, since)
    return summed_attention(
        queries, k, order, pairs, scratch, share, group="max" if group_max else "sum", causal=causal
    )
