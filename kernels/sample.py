"""Draw the next token of every lane from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Probabilities are summed as integers of 2^-40: such sums are exact, so they do not depend on the order of addition.
_ONE = float(1 << 40)
# Two digits hold a probability: no float up to 1 uses its sign or its highest exponent bit.
_DIGIT_BITS = 15
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Filters:
    """What each lane samples with, [B] each. None: no lane of this step uses it.

    Attributes:
        any_greedy: False where the host knows that no temperature is below GREEDY_BELOW.
    """

    temperature: Tensor  # float32; below GREEDY_BELOW is argmax
    top_k: Tensor | None = None  # int64, 0 = off
    top_p: Tensor | None = None  # float32
    min_p: Tensor | None = None  # float32
    any_greedy: bool = True

    def row(self, b: int) -> Filters:
        """Those of one lane."""
        top_k, top_p, min_p = (None if x is None else x[b, None] for x in (self.top_k, self.top_p, self.min_p))
        return Filters(self.temperature[b, None], top_k, top_p, min_p, self.any_greedy)


def sample(logits: Tensor, filters: Filters | None, uniform: Tensor | None) -> Tensor:
    """Temperature, top_k, top_p, min_p, then the inverse of the cumulative distribution in id order.

    Args:
        logits: float [B, V]; -inf is never drawn.
        filters: None when every lane is greedy.
        uniform: float32 [B] in (0, 1), one draw a lane; None when every lane is greedy.

    Returns:
        int64 [B]: the token, or -1 where the row holds NaN or +inf, or nothing but -inf.
    """
    if filters is not None and uniform is not None and len(logits) > 1 and logits.device.type == "cpu":
        # Row by row a processor's caches hold what is worked on, and the allocator keeps the memory.
        return torch.cat([sample(logits[b, None], filters.row(b), uniform[b, None]) for b in range(len(logits))])
    top = logits.amax(-1)  # propagates NaN
    finite = top.isfinite()
    if filters is None or uniform is None:
        return torch.where(finite, logits.argmax(-1), -1)
    temperature = filters.temperature.clamp(min=GREEDY_BELOW)
    centred = (logits - top[:, None]).div_(temperature[:, None]).to(torch.float32)
    centred.masked_fill_(~finite[:, None], 0.0)  # such a row is marked below; until then it must not upset the search
    token = _draw(centred.softmax(-1), filters, uniform)
    if filters.any_greedy:
        token = torch.where(filters.temperature < GREEDY_BELOW, logits.argmax(-1), token)
    return torch.where(finite, token, -1)


def _draw(p: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    if filters.top_k is not None:
        wanted = torch.where(filters.top_k > 0, filters.top_k.clamp(max=p.shape[-1]), p.shape[-1])
        p = p.where(_largest(p, torch.ones_like(p, dtype=torch.int64), wanted), 0.0)
        # A lane without top_k is left as it is: its draw must not hang on its neighbours.
        p = p / torch.where(filters.top_k[:, None] > 0, p.sum(-1, keepdim=True), 1.0)
    weight = (p * _ONE).to(torch.int64)
    if filters.top_p is not None:
        wanted = (filters.top_p.to(torch.float64) * weight.sum(-1)).ceil().to(torch.int64).clamp(min=1)
        weight = weight.where(_largest(p, weight, wanted) | (filters.top_p >= 1)[:, None], 0)
    if filters.min_p is not None:
        weight = weight.where(p >= filters.min_p[:, None] * p.amax(-1, keepdim=True), 0)
    cdf = weight.cumsum(-1)
    target = (uniform.to(torch.float64) * cdf[:, -1]).to(torch.int64)  # floor, so below the total
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)


def _largest(p: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """The smallest set of largest ``p`` whose weight reaches ``wanted``; ties to the lower id.

    Args:
        p: float32 [B, V], from 0 to 1 (a rounding more). weight: int64 [B, V], not negative. wanted: int64 [B], 1 ..
            the row's total.

    Returns:
        bool [B, V].

    A radix search for the last value that is needed, by the high digit of its bits and then the low one (floats that
    are not negative order as their bits do). A full sort of the vocabulary costs more than a layer of a small model.
    """
    key = p.view(torch.int32)
    high, low = key >> _DIGIT_BITS, key & ((1 << _DIGIT_BITS) - 1)
    first, missing = _digit(high, weight, wanted[:, None])
    second, missing = _digit(low, weight.where(high == first, 0), missing)
    last = (first << _DIGIT_BITS) | second
    tied = weight.where(key == last, 0)
    # Of the ties, those are taken before which the weight still falls short.
    return (key > last) | ((key == last) & (tied.cumsum(-1) - tied < missing))


def _digit(digit: Tensor, weight: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The digit, int32 [B, 1], at which the weight from the highest down reaches ``wanted`` [B, 1], and what is
    missing of it after all higher ones."""
    histogram = torch.zeros(len(digit), 1 << _DIGIT_BITS, dtype=torch.int64, device=digit.device)
    up_to = histogram.scatter_add_(1, digit.to(torch.int64), weight).cumsum(-1)
    above = up_to[:, -1:] - up_to  # weight of all larger digits
    chosen = (above >= wanted).sum(-1, keepdim=True)
    return chosen.to(torch.int32), wanted - above.gather(1, chosen)
