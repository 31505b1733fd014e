"""Keeps account of what leaves one lane of a ring, for a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringkv.engine.live import Live
from ringkv.errors import RingkvError

PREFILL, DROPPED, LIVE = 0, 65534, 65535  # beside the numbers of evictions, 1 to 65533
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Memory:
    """Where every token went, for L layers, H KV heads and the T tokens that were read.

    Attributes:
        taken: uint16 [L, H, T], the number of the layer's eviction that took a token; 0: the one at prefill; 65534:
            retention did not let it in; 65535: it is live at the end.
        v_range: float16 [L, H, T], max - min of the value vector.
        evicted_at: int32 [L, E], how many tokens had been read when a layer evicted; eviction e in column e - 1, and 0
            where a layer has evicted fewer times than another.
    """

    taken: np.ndarray
    v_range: np.ndarray
    evicted_at: np.ndarray


class _Eviction(NamedTuple):
    """What one eviction took from a layer: after ``seen`` tokens, positions and their value ranges [H, W]."""

    layer: int
    seen: int
    position: np.ndarray
    v_range: np.ndarray


class Recorder:
    """Takes down what the ring does with one lane. It waits for the device at each eviction.

    Args:
        layers: how many there are.
    """

    def __init__(self, layers: int) -> None:
        self._prompt: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0))] * layers
        self._evictions: list[_Eviction] = []

    def copy(self) -> Recorder:
        """For a lane that goes its own way from here."""
        other = Recorder(len(self._prompt))
        other._prompt, other._evictions = list(self._prompt), list(self._evictions)
        return other

    def admit(self, layer: int, retained: Tensor, kept: Tensor, v_range: Tensor) -> None:
        """A prompt's layer of n tokens was written.

        Args:
            retained: positions [c] that retention let in. kept: positions [H, c'] that are left of them.
            v_range: float32 [H, n], of all.
        """
        taken = torch.full_like(v_range, DROPPED, dtype=torch.int64)
        taken[:, retained] = PREFILL
        taken.scatter_(1, kept, LIVE)
        self._prompt[layer] = taken.cpu().numpy().astype(np.uint16), _half(v_range)

    def evict(self, layer: int, seen: Tensor, position: Tensor, v_range: Tensor) -> None:
        """A layer has lost the tokens at ``position`` [H, W], after ``seen`` tokens (a scalar)."""
        self._evictions.append(_Eviction(layer, int(seen), position.cpu().numpy(), _half(v_range)))

    def memory(self, seen: int, position: Tensor, v_range: Tensor) -> Memory:
        """The account after ``seen`` tokens; what the ring did later, in a step that is not reported, is left out.

        Args:
            position: [L, H, S], the ring's marks. v_range: float32 [L, H, S], the ranges beside them.
        """
        prompt = np.stack([taken for taken, _ in self._prompt])
        layers, heads, n = prompt.shape
        taken = np.full((layers, heads, seen), LIVE, np.uint16)
        ranges = np.zeros((layers, heads, seen), np.float16)
        taken[..., :n] = prompt
        ranges[..., :n] = np.stack([values for _, values in self._prompt])
        marks, values = position.cpu().numpy(), _half(v_range)
        layer, head, slot = np.nonzero((marks >= n) & (marks < seen))
        ranges[layer, head, marks[layer, head, slot]] = values[layer, head, slot]
        times: list[list[int]] = [[] for _ in range(layers)]
        rows = np.arange(heads)[:, None]
        for lost in self._evictions:
            inside = lost.position < seen
            at = (lost.layer, np.broadcast_to(rows, inside.shape)[inside], lost.position[inside])
            ranges[at] = lost.v_range[inside]
            if lost.seen <= seen:
                times[lost.layer].append(lost.seen)
                taken[at] = len(times[lost.layer])
        evicted_at = np.zeros((layers, max(map(len, times))), np.int32)
        for row, each in zip(evicted_at, times, strict=True):
            row[: len(each)] = each
        return Memory(taken, ranges, evicted_at)


def take_down(recorders: dict[int, Recorder], live: Live, victim: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Tell the recorders of some lanes what an eviction takes: ``victim`` bool [P, H, c] among the live tokens."""
    for row, (layer, lane) in enumerate(pairs):
        if lane in recorders:
            gone = victim[row].nonzero()[:, 1].view(len(victim[row]), -1)  # [H, W]
            taken = (tokens[row].gather(1, gone) for tokens in (live.position, live.v_range))
            recorders[lane].evict(layer, live.seen[row], *taken)


def check_countable(layer_evictions: int) -> None:
    """Refuse a request that could see more evictions than 16 bits tell apart.

    Raises:
        RingkvError: with the numbers.
    """
    if layer_evictions >= DROPPED:
        raise RingkvError(
            f"trace: max_tokens and window allow {layer_evictions} evictions a layer; accepted are up to {DROPPED - 1}"
        )


def _half(values: Tensor) -> np.ndarray:
    return values.clamp(max=_LARGEST).to(torch.float16).cpu().numpy()
