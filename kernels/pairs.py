"""The (layer, lane) pairs that an operation works on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Pairs(list[tuple[int, int]]):
    """Pairs that the host knows as ints, and the device as tensors.

    Attributes:
        layer, lane: int64 [P].
    """

    def __init__(self, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        super().__init__(pairs)
        # Pinned memory lets the host go on while the device still computes.
        index = torch.tensor(self, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self.layer, self.lane = index.T.contiguous()


def layers_and_lanes(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tensors of pairs, for a kernel."""
    assert isinstance(pairs, Pairs)
    return pairs.layer, pairs.lane
