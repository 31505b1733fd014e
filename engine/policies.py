"""Eviction policies: which tokens leave the ring when it is full.

A policy is a frozen dataclass of its hyperparameters with one method, ``priority``: a float32 number for every candidate,
of which the lowest leave. What is protected, ties, and the ring itself are the shared routine's (``ring.py``). To add a
policy, write the dataclass and register it; every test of the table runs over it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.engine.live import Live
from ringkv.engine.spec import parse_spec
from ringkv.errors import RingkvError
from ringkv.kernels.philox import gumbel


class Policy:
    """Base of every policy.

    Attributes:
        name: what ``--policy`` and ``RingConfig`` call it.
        source: the paper.
        keeps: one line, what stays.
        evicts: False only for ``full``.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    evicts: ClassVar[bool] = True

    def priority(self, live: Live) -> Tensor:
        """float32 [P, H, c]: one number a candidate, in position order; the lowest leave, of equals the older.

        Must not write anything but ``live.state`` and must not synchronise with the host. +inf keeps a candidate as
        long as others are left; NaN counts as -inf.
        """
        raise NotImplementedError


POLICIES: dict[str, type[Policy]] = {}


def register_policy(cls: type[Policy]) -> type[Policy]:
    """Class decorator: make a policy known by its ``name``."""
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise RingkvError(
            f"policy {cls.__name__}: must be a frozen dataclass (@dataclass(frozen=True) below the decorator)"
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or any(mark in name for mark in ":,= "):
        raise RingkvError.bad(f"policy {cls.__name__}: name", name, "a text without ':', ',', '=' and spaces")
    if POLICIES.get(name, cls).__qualname__ != cls.__qualname__:
        raise RingkvError.bad(f"policy {cls.__name__}: name", name, "a name that is not taken")
    POLICIES[name] = cls
    return cls


def as_policy(value: str | Policy) -> Policy:
    """A policy from its name, from ``"name:field=value,..."``, or as it is."""
    if isinstance(value, str):
        return parse_spec("policy", value, POLICIES)
    if not isinstance(value, Policy):
        raise RingkvError.bad("policy", value, f"{', '.join(POLICIES)}, or an object of a Policy subclass")
    return value


def check_int(policy: Policy, field: str, least: int, odd: bool = False) -> None:
    """Refuse a field that is not an int of at least ``least`` (and odd, where that is asked)."""
    value = getattr(policy, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (odd and value % 2 == 0):
        raise RingkvError.bad(f"policy {policy.name}: {field}", value, f"an {'odd ' * odd}int >= {least}")


def pool_mean(score: Tensor, kernel: int) -> Tensor:
    """Average over neighbours in position order: zero padding, the divisor always ``kernel``. [P, Hq, c]."""
    return score if kernel == 1 else F.avg_pool1d(score, kernel, stride=1, padding=kernel // 2, count_include_pad=True)


@register_policy
@dataclass(frozen=True)
class Full(Policy):
    """Evicts nothing; a request that cannot fit is refused at the start."""

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "-"
    keeps: ClassVar[str] = "everything; refuses what does not fit"
    evicts: ClassVar[bool] = False


@register_policy
@dataclass(frozen=True)
class Streaming(Policy):
    """StreamingLLM (arXiv 2309.17453): sinks and the most recent tokens. Keys keep their absolute positions, as the
    whole engine does, where the paper renumbers them inside the cache."""

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    keeps: ClassVar[str] = "the sinks and the most recent tokens"

    def priority(self, live: Live) -> Tensor:
        """The position itself; exact in float32 below 2^24, and only the order counts above."""
        return live.position[..., : live.candidates].to(torch.float32)


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
            check_int(self, "large", 0)
        check_int(self, "kernel", 1, odd=True)

    def priority(self, live: Live) -> Tensor:
        """+inf for what stays by range, else the log weight with its noise."""
        weight, kept = self.weights(live)
        return torch.where(kept, torch.inf, torch.log(weight) + gumbel(live.uniform()))

    def weights(self, live: Live) -> tuple[Tensor, Tensor]:
        """The sampling weights [P, H, c], and which candidates stay by range or as sinks, bool [P, H, c]."""
        pinned = live.pinned
        large = live.budget // 4 if self.large is None else self.large
        room = live.budget - live.window - pinned.sum(-1, keepdim=True)  # [P, H, 1]
        v_range = live.v_range[..., : live.candidates].masked_fill(live.sink, torch.inf).masked_fill(pinned, -torch.inf)
        # Ascending and stable: of equal ranges the older stand first, so the younger are kept.
        ascending = torch.sort(v_range, dim=-1, stable=True).indices
        rank = torch.empty_like(ascending).scatter_(
            -1, ascending, torch.arange(live.candidates).to(ascending).expand_as(ascending)
        )
        kept = (rank >= live.candidates - room.clamp(max=large)) | live.sink
        return pool_score(live, self.kernel), kept


def pool_score(live: Live, kernel: int) -> Tensor:
    """SnapKV's score (arXiv 2404.14469): mean window attention, pooled, averaged over the head group. [P, H, c]."""
    return live.group_mean(pool_mean(live.attention(), kernel))
