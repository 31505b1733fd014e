"""The hook of a ring: what it tells whoever wants to know where tokens go."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringkv.engine.policies.live import Live


class RingObserver:
    """Hears of everything that enters or leaves the lanes of a ring; put it into ``Ring.observers``.

    Every method does nothing here: override those that matter. The ring calls them in the order of what happens. They
    must not write to what they are given. Reading a tensor waits for the device.
    """

    def reset(self, lane: int) -> None:
        """A lane was emptied for a new request."""

    def copied(self, source: int, target: int) -> None:
        """Lane ``target`` became a copy of lane ``source``."""

    def admitted(self, layer: int, lane: int, retained: Tensor, live: Tensor, v_range: Tensor) -> None:
        """A layer of a prompt of n tokens was written.

        Args:
            retained: int64 [c], the positions that retention let in.
            live: int64 [H, c'], the positions that were written; fewer where the policy ranked them down.
            v_range: float32 [H, n], the value ranges of the whole prompt.
        """

    def evicted(self, pairs: Sequence[tuple[int, int]], live: Live, victim: Tensor) -> None:
        """An eviction freed slots.

        Args:
            pairs: the P (layer, lane) pairs.
            live: the tokens that were live before it.
            victim: bool [P, H, c], which of the candidates left.
        """
