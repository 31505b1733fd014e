"""Where the tokens of a request went: an observer of the ring takes it down for a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringkv.engine.policies.live import Live
from ringkv.engine.ring.observer import RingObserver
from ringkv.engine.ring.storage import Ring
from ringkv.errors import RingkvError

PREFILL, DROPPED, LIVE = 0, 65534, 65535  # beside the numbers of evictions, 1 to 65533
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class Record:
    """Where every token of a request went: L layers, H KV heads, N tokens of prompt and answer, T of them read.

    Attributes:
        token_ids: int32 [N].
        taken: uint16 [L, H, T], the number of the layer's eviction that took a token. 0 is the eviction at prefill,
            65534 a token that retention did not let in, 65535 one that is live at the end.
        v_range: float16 [L, H, T], max - min of the value vector.
        evicted_at: int32 [L, E], how many tokens had been read when a layer evicted: eviction e in column e - 1, and 0
            where a layer has evicted fewer times than another.
        prompt_tokens: how many of the N tokens are the prompt's.
        pin: the end of the pinned span, which starts at 0.
    """

    token_ids: np.ndarray
    taken: np.ndarray
    v_range: np.ndarray
    evicted_at: np.ndarray
    prompt_tokens: int
    pin: int

    @property
    def seen(self) -> int:
        """T."""
        return int(self.taken.shape[2])

    @property
    def retained(self) -> list[int]:
        """Prompt tokens that retention let in, by layer, before the policy ranked them down."""
        return [int(n) for n in (self.taken[:, 0, : self.prompt_tokens] != DROPPED).sum(-1)]

    @property
    def evictions(self) -> list[int]:
        """Evictions of each layer, without the one at prefill."""
        return [int(n) for n in (self.evicted_at > 0).sum(-1)]

    def left_at(self) -> np.ndarray:
        """How many tokens had been read when each one left: int32 [L, H, T]; T + 1 where it is live at the end."""
        layers, _, seen = self.taken.shape
        ends = np.full((layers, LIVE + 1), self.prompt_tokens, np.int32)
        ends[:, PREFILL + 1 : self.evicted_at.shape[1] + 1] = self.evicted_at
        ends[:, LIVE] = seen + 1
        return ends[np.arange(layers)[:, None, None], self.taken]

    def live(self, seen: int | None = None) -> np.ndarray:
        """The live set after ``seen`` tokens, by default at the end: bool [L, H, T].

        Args:
            seen: ``prompt_tokens`` to T.
        """
        seen = self.seen if seen is None else seen
        if not self.prompt_tokens <= seen <= self.seen:
            raise RingkvError.bad("seen", seen, f"{self.prompt_tokens} to {self.seen}")
        return (self.left_at() > seen) & (np.arange(self.seen) < seen)


class _Eviction(NamedTuple):
    """What one eviction took from a layer: after ``seen`` tokens, positions and their value ranges [H, W]."""

    layer: int
    seen: int
    position: np.ndarray
    v_range: np.ndarray


@dataclass
class _Lane:
    """What is known of one lane: by layer what became of its prompt, (taken, v_range) [H, n]; and its evictions."""

    prompt: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    evictions: list[_Eviction] = field(default_factory=list)


class Recorder(RingObserver):
    """Takes down what a ring does with every lane. It waits for the device at each eviction.

    Args:
        ring: what it observes.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._lanes: dict[int, _Lane] = {}

    def reset(self, lane: int) -> None:
        """See ``RingObserver``."""
        self._lanes[lane] = _Lane()

    def copied(self, source: int, target: int) -> None:
        """See ``RingObserver``."""
        lane = self._lanes[source]
        self._lanes[target] = _Lane(dict(lane.prompt), list(lane.evictions))

    def admitted(self, layer: int, lane: int, retained: Tensor, live: Tensor, v_range: Tensor) -> None:
        """See ``RingObserver``."""
        taken = torch.full_like(v_range, DROPPED, dtype=torch.int64)
        taken[:, retained] = PREFILL
        taken.scatter_(1, live, LIVE)
        self._lanes[lane].prompt[layer] = taken.cpu().numpy().astype(np.uint16), _half(v_range)

    def evicted(self, pairs: Sequence[tuple[int, int]], live: Live, victim: Tensor) -> None:
        """See ``RingObserver``."""
        for row, (layer, lane) in enumerate(pairs):
            gone = victim[row].nonzero()[:, 1].view(len(victim[row]), -1)  # [H, W]
            position, v_range = (tokens[row].gather(1, gone) for tokens in (live.position, live.v_range))
            lost = _Eviction(layer, int(live.seen[row]), position.cpu().numpy(), _half(v_range))
            self._lanes[lane].evictions.append(lost)

    def record(self, lane: int, prompt: Sequence[int], tokens: Sequence[int], pin: int) -> Record:
        """What became of a request whose prompt was read and whose lane still holds it.

        What the ring did later than the last of ``tokens``, in a step that is not reported, is left out.
        """
        seen = len(prompt) + max(0, len(tokens) - 1)
        own = self._lanes[lane]
        before = [own.prompt[layer] for layer in range(self._ring.layers)]
        entered = np.stack([taken for taken, _ in before])
        layers, heads, n = entered.shape
        taken = np.full((layers, heads, seen), LIVE, np.uint16)
        ranges = np.zeros((layers, heads, seen), np.float16)
        taken[..., :n] = entered
        ranges[..., :n] = np.stack([values for _, values in before])
        marks, values = self._ring.position[:, lane].cpu().numpy(), _half(self._ring.v_range[:, lane])
        layer, head, slot = np.nonzero((marks >= n) & (marks < seen))
        ranges[layer, head, marks[layer, head, slot]] = values[layer, head, slot]
        times: list[list[int]] = [[] for _ in range(layers)]
        rows = np.arange(heads)[:, None]
        for lost in own.evictions:
            inside = lost.position < seen
            at = (lost.layer, np.broadcast_to(rows, inside.shape)[inside], lost.position[inside])
            ranges[at] = lost.v_range[inside]
            if lost.seen <= seen:
                times[lost.layer].append(lost.seen)
                taken[at] = len(times[lost.layer])
        evicted_at = np.zeros((layers, max(map(len, times))), np.int32)
        for row, each in zip(evicted_at, times, strict=True):
            row[: len(each)] = each
        ids = np.array([*prompt, *tokens], np.int32)
        return Record(ids, taken, ranges, evicted_at, len(prompt), pin)


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
