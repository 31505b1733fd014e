from __future__ import annotations

import pytest
import torch

from kernel_checks import assert_as_exact, summed_and_normed, three_ways
from ringkv.kernels.backend import use
from ringkv.kernels.table import add_rms_norm, silu_mul


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, width", [(1, 63), (3, 64), (2, 1000), (5, 111)])
@pytest.mark.parametrize("first", [True, False])
def test_add_rms_norm(rows, width, first, dtype):
    x = 3 * draw(rows, width, dtype=dtype)
    delta = None if first else draw(rows, width, dtype=dtype, seed=1)
    kernel, twin, exact = three_ways(summed_and_normed, x, delta, 1 + draw(width, dtype=dtype, seed=2), 1e-6)
    assert torch.equal(kernel[0], twin[0])
    assert_as_exact(kernel[1], twin[1], exact[1])


def test_a_row_of_zeros_stays_finite():
    with use("triton"):
        assert (add_rms_norm(torch.zeros(1, 40), None, torch.ones(40), 1e-6) == 0).all()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, width", [(1, 63), (3, 1024), (2, 1025)])
def test_silu_mul(rows, width, dtype):
    gate_up = 4 * draw(rows, 2 * width, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = -200, 200
    assert_as_exact(*three_ways(silu_mul, gate_up))
