"""What of a prompt enters the ring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ringkv.engine.spec import parse_spec
from ringkv.errors import RingkvError, check_int


class Retention(Protocol):
    """Decides, a layer at a time, which prompt tokens enter the ring before any eviction."""

    name: ClassVar[str]

    def keep(self, layer: int, n: int, last_attention: Callable[[], Tensor]) -> Tensor | None:
        """Positions to keep.

        Args:
            layer: the layer's index.
            n: tokens of the prompt.
            last_attention: computes the last query's attention, float32 [Hq, n], if it is needed.

        Returns:
            bool [n], or None for all of them.
        """
        ...


@dataclass(frozen=True)
class All:
    """The whole prompt."""

    name: ClassVar[str] = "all"

    def keep(self, layer: int, n: int, last_attention: Callable[[], Tensor]) -> Tensor | None:
        """None: everything."""
        return None


@dataclass(frozen=True)
class ReFreeKV:
    """ReFreeKV (arXiv 2502.16886): no budget a prompt, one threshold for every input.

    Positions are ranked: the first ``first``, then from the last backwards. Of that ranking the shortest prefix is
    kept whose attention norm falls short of the whole by at most ``threshold``, as a share. The norm is the Euclidean
    one of the last query's attention row, averaged over the heads of the layer, accumulated in float64; one length for
    all heads. The first ``whole_layers`` layers keep everything.

    Deviation from the paper: what the ring protects (sinks, pins, the last window) enters too, whatever its rank.

    >>> attention = torch.tensor([[0.6, 0, 0, 0, 0, 0, 0, 0.4]])  # [Hq, n]
    >>> ReFreeKV().keep(layer=2, n=8, last_attention=lambda: attention).nonzero().flatten().tolist()
    [0, 1, 2, 3, 7]
    >>> ReFreeKV().keep(layer=0, n=8, last_attention=lambda: attention) is None  # everything
    True
    """

    name: ClassVar[str] = "refreekv"

    threshold: float = 0.01
    first: int = 4
    whole_layers: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, (int, float)) or not 0 <= self.threshold < 1:
            raise RingkvError.bad("retention refreekv: threshold", self.threshold, "a number in [0, 1)")
        for field in ("first", "whole_layers"):
            check_int(f"retention refreekv: {field}", getattr(self, field), 0)

    def keep(self, layer: int, n: int, last_attention: Callable[[], Tensor]) -> Tensor | None:
        """The prefix of the ranking that enters, as a mask [n]; None in a whole layer."""
        if layer < self.whole_layers:
            return None
        attention = last_attention()
        ranking = self.ranking(n, attention.device)
        enters = torch.zeros(n, dtype=torch.bool, device=attention.device)
        enters[ranking[: self.prefix(attention)]] = True
        return enters

    def ranking(self, n: int, device: torch.device | None = None) -> Tensor:
        """Positions by rank: 0 .. first-1, then n-1 downwards."""
        first = min(self.first, n)
        return torch.cat((torch.arange(first, device=device), torch.arange(n - 1, first - 1, -1, device=device)))

    def prefix(self, attention: Tensor) -> int:
        """How many positions of the ranking enter, for attention rows [Hq, n]."""
        n = attention.shape[1]
        ranked = attention[:, self.ranking(n, attention.device)].to(torch.float64)
        norm = ranked.square().cumsum(-1).sqrt().mean(0)  # [n]
        short = (norm[-1] - norm) / norm[-1] > self.threshold
        return min(int(short.sum()) + 1, n)


RETENTIONS: dict[str, type[All] | type[ReFreeKV]] = {cls.name: cls for cls in (ReFreeKV, All)}


def as_retention(value: str | Retention) -> Retention:
    """A retention from its name, from ``"name:field=value,..."``, or as it is."""
    if isinstance(value, str):
        return parse_spec("retention", value, RETENTIONS)
    if not callable(getattr(value, "keep", None)) or not isinstance(getattr(value, "name", None), str):
        raise RingkvError.bad(
            "retention", value, f"{', '.join(RETENTIONS)}, or an object with a name and a keep method"
        )
    return value


def last_attention(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q.k / sqrt(D)) of one query over all keys: q [Hq, D], k [n, H, D] -> float32 [Hq, n]."""
    heads = k.shape[1]
    grouped = q.unflatten(0, (heads, -1)).to(torch.float32)  # [H, G, D]
    logits = torch.matmul(grouped, k.to(torch.float32).permute(1, 2, 0)) / math.sqrt(q.shape[-1])
    return logits.softmax(-1).flatten(0, 1)
