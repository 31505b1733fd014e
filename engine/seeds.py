"""Which seed a request gets. Every draw of a request follows from it, and the result reports it."""

from __future__ import annotations

import secrets

import torch

from ringkv.kernels.table import philox


def effective_seed(given: int | None, engine_seed: int | None, index: int, greedy: bool) -> int:
    """The request's seed, unsigned, 64 bits.

    Given > drawn from (engine seed, request index) > 0 for a greedy request, so that greedy is repeatable under a
    policy that draws > drawn afresh.
    """
    if given is not None:
        return given % (1 << 64)
    if engine_seed is not None:
        key = engine_seed % (1 << 64)
        low, high, *_ = philox(torch.tensor(key - (1 << 64) if key >> 63 else key), index, 0, 0, 0)
        return int(low) | int(high) << 32
    return 0 if greedy else secrets.randbits(64)
