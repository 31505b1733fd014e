"""Counter-based noise: Philox4x32-10 (Salmon et al., SC 2011), the same bits on every path.

A number depends on its key and counter alone, never on what was drawn before it, so a lane's noise is that of its own
request whatever its neighbours do. Key = the request's 64-bit seed; counter = (c0, c1, c2, tag + 256 * sample index).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOKEN, EVICTION, PROJECTION = 0, 1, 2  # tags: what a draw is for

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int) -> tuple[Tensor, ...]:
    """The four output words, each an int64 tensor of values in [0, 2^32).

    Args:
        seed: int64, the key; all 64 bits count.
        c0, c1, c2, c3: the counter's words, int64 tensors or ints in [0, 2^32); all broadcast together.
    """
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    x0, x1, x2, x3 = (torch.as_tensor(c, dtype=torch.int64, device=seed.device) for c in (c0, c1, c2, c3))
    for _ in range(4 if seed.is_meta else 10):  # where memory is counted: by then every word has its whole shape
        # int64 products wrap; shift and mask still give bits 32..63 of the unsigned product.
        a, b = x0 * _ROUND_A, x2 * _ROUND_B
        x0, x1, x2, x3 = (
            ((b >> 32) & _MASK) ^ x1 ^ key_a,
            b & _MASK,
            ((a >> 32) & _MASK) ^ x3 ^ key_b,
            a & _MASK,
        )
        key_a, key_b = (key_a + _KEY_A) & _MASK, (key_b + _KEY_B) & _MASK
    return x0, x1, x2, x3


def to_uniform(word: Tensor) -> Tensor:
    """A word as a float32 strictly inside (0, 1): 23 bits, centred."""
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def normal(first: Tensor, second: Tensor) -> Tensor:
    """Standard normal float32 numbers from two words (Box-Muller, the cosine half)."""
    return torch.sqrt(-2.0 * torch.log(to_uniform(first))) * torch.cos(2.0 * math.pi * to_uniform(second))


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise. Adding it to log weights and keeping the largest samples without replacement."""
    return -torch.log(-torch.log(uniform))
