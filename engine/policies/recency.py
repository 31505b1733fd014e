"""Policies that do not look at what a token holds: ``full``, ``streaming``, ``random``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringkv.engine.policies.base import Policy, register_policy
from ringkv.engine.policies.live import Live


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
class Random(Policy):
    """Victims drawn uniformly: the baseline that any informed policy has to beat."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "-"
    keeps: ClassVar[str] = "a uniform sample"

    def priority(self, live: Live) -> Tensor:
        """Uniform noise."""
        return live.uniform()
