"""Policies that rank tokens by the attention they get: ``tova``, ``h2o``, ``snapkv``, ``rkv``, ``gkv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.engine.policies.base import MOST_FIELD, Policy, register_policy
from ringkv.engine.policies.live import Live
from ringkv.errors import check_int, check_number


@register_policy
@dataclass(frozen=True)
class Tova(Policy):
    """TOVA (arXiv 2401.06104): the last query's attention, averaged over all query heads of the layer.

    Slots differ by head, so heads are averaged by rank in position order. One ranking serves the whole layer, hence its
    heads lose the same positions, and a rank is the same position in each.
    """

    name: ClassVar[str] = "tova"
    source: ClassVar[str] = "TOVA, arXiv 2401.06104"
    keeps: ClassVar[str] = "what the last query attends to, one choice for all heads of a layer"

    def priority(self, live: Live) -> Tensor:
        """Mean attention of the last query, the same for every head."""
        mean = live.attention(last_only=True).mean(1, keepdim=True)  # [P, 1, c]
        return mean.expand(-1, live.slot.shape[1], -1)


@register_policy
@dataclass(frozen=True)
class H2O(Policy):
    """H2O (arXiv 2306.14048): the attention that a token has got from every query so far, summed.

    A query's softmax is over all live keys it could see, and the sums are averaged over the head group. At prefill
    that is the whole prompt, before retention. The window plays the part of the paper's recent tokens.
    """

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    keeps: ClassVar[str] = "what has got the most attention since the beginning"
    slot_state: ClassVar[tuple[str, ...]] = ("mass",)
    lane_state: ClassVar[Mapping[str, Tensor]] = {"observed": torch.zeros((), dtype=torch.int64)}

    def priority(self, live: Live) -> Tensor:
        """The attention summed so far."""
        return live.state["mass"][..., : live.candidates]

    def observe(self, live: Live) -> Mapping[str, Tensor]:
        """Add the attention of the queries that are new."""
        new = live.received_attention(since=live.state["observed"])
        return {"mass": live.state["mass"] + new, "observed": live.seen}


@register_policy
@dataclass(frozen=True)
class SnapKV(Policy):
    """SnapKV (arXiv 2404.14469): attention of the window's queries, averaged over neighbours and the head group.

    Neighbours are neighbours in position order among the candidates: gaps that evictions left do not count.

    Attributes:
        kernel: width of the average over neighbours, odd; 1 is none.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    keeps: ClassVar[str] = "what the window's queries attend to, with its neighbours"

    kernel: int = 5

    def __post_init__(self) -> None:
        check_int(f"policy {self.name}: kernel", self.kernel, 1, MOST_FIELD, odd=True)

    def priority(self, live: Live) -> Tensor:
        """The pooled score."""
        return pool_score(live, self.kernel)


@register_policy
@dataclass(frozen=True)
class RKV(Policy):
    """R-KV (arXiv 2505.24133): importance, less the redundancy of keys that resemble later ones.

    The authors' published code where it differs from the paper's text.

    Attributes:
        lam: the share of importance; 1 - lam is that of redundancy.
        kernel: width of the maximum over neighbours of the importance, odd; 1 is none.
        threshold: keys of a larger cosine count as alike.
    """

    name: ClassVar[str] = "rkv"
    source: ClassVar[str] = "R-KV, arXiv 2505.24133, the authors' code"
    keeps: ClassVar[str] = "what the window's queries attend to and no other key resembles"

    lam: float = 0.1
    kernel: int = 7
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number(f"policy {self.name}: lam", self.lam, 0, 1)
        check_int(f"policy {self.name}: kernel", self.kernel, 1, MOST_FIELD, odd=True)
        check_number(f"policy {self.name}: threshold", self.threshold, -1, 1)

    def priority(self, live: Live) -> Tensor:
        """lam * importance - (1 - lam) * redundancy."""
        attention = live.attention(group_max=True)
        importance = F.max_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
        redundancy = live.redundancy(self.threshold).softmax(-1)[..., : live.candidates]
        return self.lam * importance - (1 - self.lam) * redundancy


@register_policy
@dataclass(frozen=True)
class GKV(Policy):
    """G-KV (arXiv 2512.00504): the window's attention or what is remembered of it, less R-KV's redundancy.

    The attention of a query is a softmax over all live keys that it can see, in each query head; the largest over the
    head group counts, relative to that of the most attended candidate. A candidate's memory is what it got at earlier
    evictions, multiplied by ``alpha`` at each one since, and the larger of memory and attention counts.

    This is the authors' published code with the settings of its runs (``smooth_method`` max, redundancy suppressed),
    but with ``triton_similarity`` off, which changes the first token alone, a sink here. Their cache loses 128 tokens
    at once, of which 112 have no memory yet; here it is the window, and none of it has.

    Attributes:
        alpha: what is left of a memory at each eviction; 0 remembers nothing.
        lam: the share of attention; 1 - lam is that of redundancy.
    """

    name: ClassVar[str] = "gkv"
    source: ClassVar[str] = "G-KV, arXiv 2512.00504, the authors' code"
    keeps: ClassVar[str] = "what recent evictions found attended to and no other key resembles"
    slot_state: ClassVar[tuple[str, ...]] = ("memory",)

    alpha: float = 0.8
    lam: float = 0.5

    def __post_init__(self) -> None:
        check_number(f"policy {self.name}: alpha", self.alpha, 0, 1)
        check_number(f"policy {self.name}: lam", self.lam, 0, 1)

    def priority(self, live: Live) -> Tensor:
        """lam * memory - (1 - lam) * redundancy, relative to the largest of a candidate."""
        redundancy = live.redundancy(0.5)[..., : live.candidates]  # the divisor of its softmax over all keys cancels
        redundancy = (redundancy - redundancy.amax(-1, keepdim=True)).exp()
        return self.lam * live.state["memory"][..., : live.candidates] - (1 - self.lam) * redundancy

    def remember(self, live: Live) -> Mapping[str, Tensor]:
        """The window's attention to each candidate, or the faded memory if it is larger; nothing of the window."""
        attention = live.received_attention(torch.zeros_like(live.seen), group_max=True)[..., : live.candidates]
        # The window may take all that float32 can tell from nothing, and the largest be 0.
        attention = attention / attention.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        memory = torch.maximum(self.alpha * live.state["memory"][..., : live.candidates], attention)
        return {"memory": F.pad(memory, (0, live.window))}


def pool_score(live: Live, kernel: int) -> Tensor:
    """SnapKV's score: mean attention of the window's queries, averaged over neighbours (zero padding, the divisor
    always ``kernel``), then over the head group. [P, H, c]."""
    pooled = F.avg_pool1d(live.attention(), kernel, stride=1, padding=kernel // 2, count_include_pad=True)
    return live.group_mean(pooled)
