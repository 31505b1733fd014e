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
        # Pinned memory lets the host go on while the device still computes. An even number of columns aligns both rows
        # to 16 bytes, so that kernels are compiled once, whether the pairs are even or odd in number.
        index = torch.zeros(2, len(self) + len(self) % 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        index[:, : len(self)] = torch.tensor(self).T
        self.layer, self.lane = index.to(device, non_blocking=True)[:, : len(self)]


def layers_and_lanes(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tensors of pairs, for a kernel."""
    assert isinstance(pairs, Pairs)
    return pairs.layer, pairs.lane
