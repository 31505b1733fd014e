"""Policies that look at values: VaSE's two, and the two they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringkv.engine.policies.attention import pool_score
from ringkv.engine.policies.base import MOST_FIELD, Policy, register_policy
from ringkv.engine.policies.live import Live
from ringkv.errors import check_int
from ringkv.kernels.philox import gumbel
from ringkv.kernels.table import lowest


@register_policy
@dataclass(frozen=True)
class ValueRange(Policy):
    """Value range alone (VaSE's ablation, arXiv 2606.03928): the smallest max - min of the value vector leaves."""

    name: ClassVar[str] = "value-range"
    source: ClassVar[str] = "VaSE, arXiv 2606.03928, ablation"
    keeps: ClassVar[str] = "large value ranges"

    def priority(self, live: Live) -> Tensor:
        """The value range as it was when the token was written."""
        return live.v_range[..., : live.candidates]


@register_policy
@dataclass(frozen=True)
class VaseAttnV(Policy):
    """VaSE, variant AttnV (arXiv 2606.03928): protect large value ranges, sample the rest by attention.

    ``large`` candidates of largest value range stay, sinks counted among them; the others are sampled without
    replacement with the SnapKV score as weight. The largest log(weight) + Gumbel noise are such a sample.

    Attributes:
        large: how many stay by value range; None is a quarter of the budget. Never more than budget - window - pins.
        kernel: width of the average over neighbours, odd; 1 is none.
    """

    name: ClassVar[str] = "vase-attnv"
    source: ClassVar[str] = "VaSE, arXiv 2606.03928"
    keeps: ClassVar[str] = "large value ranges, and a sample of the rest weighted by attention"

    large: int | None = None
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.large is not None:
            check_int(f"policy {self.name}: large", self.large, 0)
        check_int(f"policy {self.name}: kernel", self.kernel, 1, MOST_FIELD, odd=True)

    def priority(self, live: Live) -> Tensor:
        """+inf for what stays by range, else the log weight with its noise."""
        weight, stays = self.weights(live)
        return torch.where(stays, torch.inf, torch.log(weight) + gumbel(live.uniform()))

    def weights(self, live: Live) -> tuple[Tensor, Tensor]:
        """The sampling weights [P, H, c], and which candidates stay by range or as sinks, bool [P, H, c]."""
        pinned = live.pinned
        large = live.budget // 4 if self.large is None else self.large
        room = live.budget - live.window - pinned.sum(-1, keepdim=True)  # [P, H, 1]
        v_range = live.v_range[..., : live.candidates].masked_fill(live.sink, torch.inf).masked_fill(pinned, -torch.inf)
        # Of equal ranges the older go first.
        small = lowest(v_range, torch.zeros_like(pinned), live.candidates - room.clamp(max=large))
        stays = ~small | live.sink
        return pool_score(live, self.kernel), stays


@dataclass(frozen=True)
class _Leverage(Policy):
    """Approximate leverage |kG|^2 * |vG|^2 under a random projection G, one a (layer, lane), for all KV heads.

    Attributes:
        rank: columns of the projection.
    """

    rank: int = 20

    def __post_init__(self) -> None:
        check_int(f"policy {self.name}: rank", self.rank, 1, MOST_FIELD)

    def projection(self, live: Live) -> Tensor:
        """G, float32 [P, D, rank], entries of variance 1 / rank."""
        raise NotImplementedError

    def priority(self, live: Live) -> Tensor:
        """The leverage."""
        return live.leverage(self.projection(live))


@register_policy
@dataclass(frozen=True)
class CurDKV(_Leverage):
    """CurDKV (arXiv 2509.15038): leverage under one projection for the whole request.

    Attributes:
        rank: columns of the projection.
    """

    name: ClassVar[str] = "curdkv"
    source: ClassVar[str] = "CurDKV, arXiv 2509.15038"
    keeps: ClassVar[str] = "keys and values of high leverage, projected once a request"

    def projection(self, live: Live) -> Tensor:
        """The request's projection [P, D, rank]."""
        return live.projection(self.rank, torch.zeros_like(live.eviction))


@register_policy
@dataclass(frozen=True)
class VaseDKV(_Leverage):
    """VaSE, variant DKV (arXiv 2606.03928): leverage under a projection drawn anew at each eviction.

    Attributes:
        rank: columns of the projection.
    """

    name: ClassVar[str] = "vase-dkv"
    source: ClassVar[str] = "VaSE, arXiv 2606.03928"
    keeps: ClassVar[str] = "keys and values of high leverage, projected anew at each eviction"

    def projection(self, live: Live) -> Tensor:
        """This eviction's projection [P, D, rank]."""
        return live.projection(self.rank, live.eviction)
