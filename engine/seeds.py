"""The seed of a request, from which each of its draws follows."""

from __future__ import annotations

import secrets

import torch

from ringkv.kernels.table import philox


def effective_seed(given: int | None, engine_seed: int | None, index: int, greedy: bool) -> int:
    """The seed of a request, or of a run of many, unsigned, 64 bits.

    It is the seed that was given. Without one it is drawn from the engine's seed and the request's index. Without
    either it is 0 for a greedy request, which is then repeatable under a policy that draws, and a fresh one otherwise.
    """
    if given is not None:
        return given % (1 << 64)
    if engine_seed is not None:
        key = engine_seed % (1 << 64)
        low, high, *_ = philox(torch.tensor(key - (1 << 64) if key >> 63 else key), index, 0, 0, 0)
        return int(low) | int(high) << 32
    return 0 if greedy else secrets.randbits(64)
