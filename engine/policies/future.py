"""Policies that rank tokens by the queries that are expected: ``expected-attention``, ``triattention``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringkv.engine.policies.base import MOST_FIELD, Policy, register_policy
from ringkv.engine.policies.live import Live, paired, unpaired
from ringkv.engine.policies.statistics import load_statistics, made_for
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
        logits = self._logits(live).unflatten(1, (live.slot.shape[1], -1))  # [P, H, G, n]
        logits.masked_fill_((live.position < live.sinks)[:, :, None], -torch.inf)
        attention = torch.softmax(logits, -1, out=logits).mean(2)[..., : live.candidates]
        return (attention + self.epsilon) * live.value_lengths()

    def _logits(self, live: Live) -> Tensor:
        """The mean logit of future queries plus half the variance: float32 [P, Hq, n]."""
        to_come = live.rotation(torch.arange(self.future, device=live.slot.device))
        queries = live.turned(to_come)  # [P, Hq, w, D]
        mean, (w, d) = queries.mean(2), queries.shape[2:]
        spread = queries.sub_(mean[:, :, None]).mul_((2 * w * d) ** -0.5) if self.covariance else None
        return live.key_scores(mean * d**-0.5, squared=spread)


@register_policy
@dataclass(frozen=True)
class TriAttention(_Future):
    """TriAttention (arXiv 2604.04921): how well a key fits the mean query, seen from distances of 1, 2, 4 .. 65,536.

    A query head's score of a key is its product with the head's mean query before RoPE, turned to each of these
    distances after the last token and averaged, plus the lengths of the key's pairs weighted by how much the queries
    scatter. It is made a z-score over all live tokens, and the largest of the head group counts.

    This is the authors' vLLM runtime with ``per_layer_per_head``, where the window is protected and takes part in the
    z-score, as sinks and pins do; it scores stored keys as they are. Not built: one choice for all layers, which their
    published runs make by averaging, or for all heads of the model.

    Angles are products of float32, as RoPE's are: a key at position p and a query at t are turned by up to 2^-24 p w
    and 2^-24 t w too far at the frequency w. With moduli m of the mean query and k of the key, the score is thus off by
    at most 2^-24 times the sum of m k w (p + mean t) over the pairs, beside the rounding of the sums.

    Attributes:
        stats: a file of the mean queries: what ``ringkv calibrate`` wrote for this model, or one that the authors
            released. Without one they are the means over the request's own tokens so far.
    """

    name: ClassVar[str] = "triattention"
    source: ClassVar[str] = "TriAttention, arXiv 2604.04921, the authors' code"
    keeps: ClassVar[str] = "keys that the mean query of a head will attend to from near and far"

    stats: str | None = None

    def start(self, model: ModelConfig) -> Mapping[str, Tensor]:
        """Mean and mean modulus of the queries before RoPE, and how many they are of where they are not given."""
        heads = model.layers, model.heads
        mean, modulus = torch.zeros(*heads, model.head_dim), torch.zeros(*heads, model.head_dim // 2)
        if self.stats is not None:
            mean, modulus = load_statistics(self.stats, model)
        observed = torch.zeros(model.layers, dtype=torch.int64)
        return {**super().start(model), "q_mean": mean, "q_modulus": modulus, "observed": observed}

    @property
    def calibrated_for(self) -> str | None:
        """The digest of the model that ``stats`` is of; None where the file does not say, or there is none."""
        return None if self.stats is None else made_for(self.stats)

    def priority(self, live: Live) -> Tensor:
        """The largest z-score of the head group."""
        raw = self.raw(live)
        std, mean = torch.std_mean(raw, -1, keepdim=True)
        z = raw.sub_(mean).div_(std.clamp_(min=1e-6))
        return z.unflatten(1, (live.slot.shape[1], -1)).amax(2)[..., : live.candidates]

    def raw(self, live: Live) -> Tensor:
        """Each query head's score of every live token: float32 [P, Hq, n]."""
        mean = paired(live.state["q_mean"])  # [P, Hq, D/2]
        distances = 1 << torch.arange(17, device=live.slot.device)
        turned = unpaired(mean * live.rotation(distances)[:, None])
        return live.key_scores(turned, moduli=live.state["q_modulus"] - mean.abs())

    def observe(self, live: Live) -> Mapping[str, Tensor]:
        """Take the new queries into the means, unless these are given."""
        if self.stats is not None:
            return {}
        old, observed = live.state, live.state["observed"]
        total, moduli = live.unrotated_sums(since=observed)
        before = (observed / live.seen)[:, None, None]  # the share of the queries that were there
        each = (1 / live.seen)[:, None, None]
        mean, modulus = old["q_mean"] * before + total * each, old["q_modulus"] * before + moduli * each
        return {"q_mean": mean, "q_modulus": modulus, "observed": live.seen}
