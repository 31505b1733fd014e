"""The log-likelihood of a text under the ring: fed token by token, evicting as decode does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.engine.policies import gave_nan
from ringkv.engine.runner import Runner


def token_scores(runner: Runner, ids: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Log-probability of each token after the first, once a seed; as many seeds at once as there are lanes.

    Args:
        ids: n >= 2 token ids; ids[0] is prefilled.

    Returns:
        float32 [len(seeds), n - 1].
    """
    lanes = runner.ring.lanes
    return torch.cat([_wave(runner, ids, seeds[start : start + lanes]) for start in range(0, len(seeds), lanes)])


def _wave(runner: Runner, ids: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """The rows of at most as many seeds as there are lanes, which run afterwards no more."""
    ring = runner.ring
    for lane, seed in enumerate(seeds):
        ring.reset(lane, seed)
        logits = runner.prefill(lane, ids[:1])
    logits = logits.expand(len(seeds), -1)
    scores = logits.new_empty(len(seeds), len(ids) - 1)
    for place, token in enumerate(ids[1:]):
        scores[:, place] = logits.log_softmax(-1)[:, token]  # a copy: a view would keep the whole row
        if place < len(ids) - 2:
            fed = torch.full((ring.lanes,), token, device=ring.seen.device)
            logits = runner.forward_alone(fed)[: len(seeds)]
    ring.stop_all()
    if ring.unranked[: len(seeds)].any():
        raise gave_nan(ring.policy)
    return scores
