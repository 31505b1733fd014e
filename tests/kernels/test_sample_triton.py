from __future__ import annotations

import math

import pytest
import torch

from ringkv.kernels.backend import use
from ringkv.kernels.sample import Filters
from ringkv.kernels.table import penalize, sample

ROWS = 6
FILTERS = Filters(
    temperature=torch.tensor([0.6, 1.0, 0.0, 100.0, 1.5, 0.8]),
    top_k=torch.tensor([20, 0, 0, 1, 10**6, 40]),
    top_p=torch.tensor([0.95, 0.9, 1.0, 0.5, 1.0, 0.0]),
    min_p=torch.tensor([0.0, 0.05, 0.0, 0.0, 0.3, 0.0]),
)


def both(logits, filters, uniform):
    with use("triton"):
        kernel = sample(logits, filters, uniform)
    with use("torch"):
        return kernel, sample(logits, filters, uniform)


def draw(width, seed=0, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ROWS, width + 9, generator=generator)[:, :width]
    return logits.round() if rounded else logits


@pytest.mark.parametrize("width, rounded", [(1, False), (63, True), (2048, False), (5000, True)])
def test_tokens_are_the_twins(width, rounded):
    """Rounded logits tie: the border of a filter then runs through equals, over several blocks."""
    logits = draw(width, rounded=rounded)
    for u in (1e-7, 0.3, 0.77, 1 - 2.0**-24):
        kernel, twin = both(logits, FILTERS, torch.full((ROWS,), u))
        assert torch.equal(kernel, twin), u


def test_a_draw_on_the_border_of_two_blocks():
    """Half of the mass lies in the first 2,048 ids, and the one after them cannot be drawn."""
    logits = torch.zeros(1, 4097)
    logits[0, 2048] = -math.inf
    kernel, twin = both(logits, Filters(torch.ones(1)), torch.tensor([0.5]))
    assert kernel.tolist() == twin.tolist() == [2049]


@pytest.mark.parametrize("left_out", ["top_k", "top_p", "min_p"])
def test_filters_that_no_lane_uses(left_out):
    filters = Filters(**{**vars(FILTERS), left_out: None})
    for seed in range(3):
        uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
        kernel, twin = both(draw(3000, seed), filters, uniform)
        assert torch.equal(kernel, twin)


def test_a_lane_without_top_k_does_not_feel_a_neighbour_that_uses_it():
    logits = draw(100)
    off, mixed = Filters(torch.ones(ROWS)), Filters(torch.ones(ROWS), top_k=torch.tensor([0, 3] * 3))
    for seed in range(3):
        uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
        for alone, beside in zip(both(logits, off, uniform), both(logits, mixed, uniform), strict=True):
            assert torch.equal(alone[::2], beside[::2])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_greedy_and_rows_that_are_not_finite():
    logits = draw(3000)
    logits[0, 1500], logits[1, 2999], logits[3] = math.nan, math.inf, -math.inf
    logits[2, :2999] = -math.inf
    logits[4, [7, 2500]] = 50.0
    for filters, uniform in ((None, None), (FILTERS, torch.full((ROWS,), 0.4))):
        kernel, twin = both(logits, filters, uniform)
        assert torch.equal(kernel, twin)
        assert kernel[[0, 1, 2, 3]].tolist() == [-1, -1, 2999, -1]
    assert both(logits, None, None)[0][4] == 7


@pytest.mark.parametrize("left_out", [(), ("bias",), ("repetition", "in_prompt"), ("presence",), ("ending", "early")])
def test_penalize_is_the_twins(left_out):
    generator = torch.Generator().manual_seed(0)

    def often():
        return torch.rand(3, 1500, generator=generator) < 0.4

    tables = {
        "bias": torch.randn(3, 1500, generator=generator),
        "repetition": torch.tensor([1.0, 1.3, 0.7]),
        "presence": torch.tensor([0.5, 0.0, -1.0]),
        "in_prompt": often(),
        "in_output": often(),
        "ending": often(),
        "early": torch.tensor([True, False, True]),
    }
    given = {name: table for name, table in tables.items() if name not in left_out}
    logits = torch.randn(3, 1600, generator=generator)[:, :1500]
    with use("triton"):
        kernel = penalize(logits, **given)
    with use("torch"):
        assert torch.equal(kernel, penalize(logits, **given))
