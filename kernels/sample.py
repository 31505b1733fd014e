"""Draw the next token of every lane from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringkv.kernels.backend import dispatched

# Probabilities are summed as integers of 2^-40: such sums are exact, so they do not depend on the order of addition.
_ONE = 1 << 40
_DIGIT_BITS = 11
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Filters:
    """What each lane samples with, [B] each. None: no lane of this step uses it."""

    temperature: Tensor  # float32; below GREEDY_BELOW is argmax
    top_k: Tensor | None = None  # int64, 0 = off
    top_p: Tensor | None = None  # float32
    min_p: Tensor | None = None  # float32


@dispatched
def sample(logits: Tensor, filters: Filters | None, uniform: Tensor | None) -> Tensor:
    """Temperature, top_k, top_p, min_p, then the inverse of the cumulative distribution in id order.

    Args:
        logits: float [B, V]; -inf is never drawn.
        filters: None when every lane is greedy.
        uniform: float32 [B] in (0, 1), one draw a lane; None when every lane is greedy.

    Returns:
        int64 [B]: the token, or -1 where the row holds NaN or +inf, or nothing but -inf.
    """
    top, greedy = logits.max(-1)
    token = greedy
    if filters is not None and uniform is not None:
        temperature = filters.temperature.clamp(min=GREEDY_BELOW)[:, None]
        # A row that is not finite is marked below; until then it must not upset the search.
        centred = torch.where(top.isfinite()[:, None], logits - top[:, None], 0.0)
        drawn = _draw((centred / temperature).to(torch.float32), filters, uniform)
        token = torch.where(filters.temperature < GREEDY_BELOW, greedy, drawn)
    return torch.where(top.isfinite(), token, -1)  # max propagates NaN


def _draw(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    p = logits.softmax(-1)
    if filters.top_k is not None:
        wanted = torch.where(filters.top_k > 0, filters.top_k.clamp(max=p.shape[-1]), p.shape[-1])
        p = torch.where(_largest(p, torch.ones_like(p, dtype=torch.int64), wanted), p, 0.0)
        # A lane without top_k is left as it is: its draw must not hang on its neighbours.
        p = p / torch.where(filters.top_k[:, None] > 0, p.sum(-1, keepdim=True), 1.0)
    if filters.top_p is not None:
        weight = _fixed(p)
        wanted = (filters.top_p.to(torch.float64) * weight.sum(-1)).ceil().to(torch.int64).clamp(min=1)
        nucleus = _largest(p, weight, wanted) | (filters.top_p >= 1)[:, None]
        p = torch.where(nucleus, p, 0.0)
    if filters.min_p is not None:
        p = torch.where(p >= filters.min_p[:, None] * p.amax(-1, keepdim=True), p, 0.0)
    cdf = _fixed(p).cumsum(-1)
    target = (uniform.to(torch.float64) * cdf[:, -1]).to(torch.int64)  # floor, so below the total
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)


def _fixed(p: Tensor) -> Tensor:
    return (p.to(torch.float64) * _ONE).to(torch.int64)


def _largest(p: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """The smallest set of largest ``p`` whose weight reaches ``wanted``; ties to the lower id.

    Args:
        p: float32 [B, V], not negative. weight: int64 [B, V], not negative. wanted: int64 [B], 1 .. the row's total.

    Returns:
        bool [B, V].

    A radix search for the last value that is needed, from the high digits of its bits down (floats that are not
    negative order as their bits do). A full sort of the vocabulary costs more than a layer of a small model.
    """
    key = p.view(torch.int32).to(torch.int64)
    prefix = torch.zeros_like(wanted)[:, None]
    missing = wanted[:, None].clone()
    for shift in (22, 11, 0):
        digit = (key >> shift) & ((1 << _DIGIT_BITS) - 1)
        inside = torch.where(key >> (shift + _DIGIT_BITS) == prefix, weight, 0)
        histogram = torch.zeros(len(p), 1 << _DIGIT_BITS, dtype=torch.int64, device=p.device)
        histogram.scatter_add_(1, digit, inside)
        above = histogram.flip(-1).cumsum(-1).flip(-1)  # weight of this digit and all larger ones
        chosen = (above >= missing).sum(-1, keepdim=True) - 1
        missing = missing - (above - histogram).gather(1, chosen)
        prefix = (prefix << _DIGIT_BITS) | chosen
    tied = key == prefix
    # Of the ties, those are taken before which the weight still falls short.
    before = torch.where(tied, weight, 0).cumsum(-1) - torch.where(tied, weight, 0)
    return (key > prefix) | (tied & (before < missing))
