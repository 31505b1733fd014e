"""Policies that rank tokens by the queries that are expected: ``expected-attention``, ``triattention``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringkv.engine.policies.base import MOST_FIELD, Policy, register_policy
from ringkv.engine.policies.live import Live, unpaired
from ringkv.errors import RingkvError, check_int, check_number
from ringkv.models.config import ModelConfig


@dataclass(frozen=True)
class _Future(Policy):
    """A policy that turns queries to positions to come."""

    def start(self, model: ModelConfig) -> Mapping[str, Tensor]:
        """The state that lanes start with.

        Raises:
            RingkvError: RoPE is ``dynamic``, whose frequencies change with the length of the text.
        """
        if model.rope.kind == "dynamic":
            raise RingkvError(f"policy {self.name}: the RoPE of this model is 'dynamic'; accepted is any other kind")
        return super().start(model)


@register_policy
@dataclass(frozen=True)
class ExpectedAttention(_Future):
    """Expected Attention (arXiv 2510.00636): the attention that future queries are expected to give, times the value.

    Future queries are those of the window, as before RoPE, turned by the mean rotation of the positions to come; their
    logits are normal, so that the expected weight is exp(mean + variance / 2). The softmax is over all live tokens but
    the sinks, the window included. This is the authors' decoding mode (kvpress) with an interval of ``window``
    tokens, but for what its code gets wrong there: positions to come begin at the next token, not at the number of
    buffered queries, and no query of the window is left out. Not built: statistics of a whole prompt or of a file, and
    budgets that differ by head (AdaKV), which a ring does not have.

    Attributes:
        future: how many positions to come are averaged over.
        covariance: whether the variance of the logits counts.
        epsilon: is added to the weight; how far the length of the value alone decides. The authors measure with 0.01.
    """

    name: ClassVar[str] = "expected-attention"
    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636, the authors' code"
    keeps: ClassVar[str] = "large values that queries like the window's will attend to"

    future: int = 512
    covariance: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_int(f"policy {self.name}: future", self.future, 1, MOST_FIELD)
        if not isinstance(self.covariance, bool):
            raise RingkvError.bad(f"policy {self.name}: covariance", self.covariance, "true or false")
        check_number(f"policy {self.name}: epsilon", self.epsilon, 0, 1)

    def priority(self, live: Live) -> Tensor:
        """(expected attention + epsilon) * the length of the value."""
        to_come = live.rotation(torch.arange(self.future, device=live.slot.device))
        queries = unpaired(live.unrotated() * to_come[:, None, None])  # [P, Hq, w, D]
        mean, (w, d) = queries.mean(2), queries.shape[2:]
        spread = (queries - mean[:, :, None]) * (2 * w * d) ** -0.5 if self.covariance else None
        logits = live.key_scores(mean * d**-0.5, squared=spread).unflatten(1, (live.slot.shape[1], -1))
        logits = logits.masked_fill((live.position < live.sinks)[:, :, None], -torch.inf)
        attention = logits.softmax(-1).mean(2)[..., : live.candidates]
        return (attention + self.epsilon) * live.value_lengths()
