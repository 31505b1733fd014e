from __future__ import annotations

import pytest
import torch

from ringkv.kernels.backend import use
from ringkv.kernels.table import philox


def word(*shape, seed):
    return torch.randint(0, 2**32, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "counter",
    [
        (word(3, 2, 700, seed=1)[..., :501], word(3, 2, 1, seed=2), word(3, 1, 1, seed=3), word(3, 1, 1, seed=4)),
        (word(5, seed=1), 0, 2**32 - 1, word(5, seed=2)),
        (word(7, 20, seed=1), word(3, 1, 1, seed=2), word(3, 1, 1, seed=3), 2),
        (1, 2, 3, 4),
    ],
)
def test_words_are_the_twins(counter):
    shape = torch.broadcast_shapes(*(c.shape for c in counter if isinstance(c, torch.Tensor)))
    for seed in (
        torch.tensor(-3),
        torch.randint(-(2**63), 2**63 - 1, (shape[0], *[1] * (len(shape) - 1)) if shape else ()),
    ):
        with use("triton"):
            got = philox(seed, *counter)
        for kernel, twin in zip(got, philox(seed, *counter), strict=True):
            assert kernel.dtype == twin.dtype
            assert torch.equal(kernel, twin)
