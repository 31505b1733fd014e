"""The sampler of a CPU, both ways, against a plain sort-based one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv.kernels.backend import use
from ringkv.kernels.sample import Filters
from ringkv.kernels.table import penalize, sample


@pytest.fixture(scope="module", params=["native", "torch"], autouse=True)
def _path(request):
    if request.param == "native":
        request.getfixturevalue("compiled")
    with use(request.param):
        yield


def survivors(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """id -> probability of what may be drawn, in float64, by sorting."""
    top = max(logits)
    weight = {i: math.exp((x - top) / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weight, key=lambda i: (-weight[i], i))
    if top_k:
        ranked = ranked[:top_k]
    total = sum(weight[i] for i in ranked)
    if top_p < 1:
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += weight[i] / total
            if mass >= top_p:
                break
        ranked = kept
    ranked = [i for i in ranked if weight[i] >= min_p * weight[ranked[0]]]
    total = sum(weight[i] for i in ranked)
    return {i: weight[i] / total for i in sorted(ranked)}


def filters(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, rows: int = 1) -> Filters:
    column = torch.ones(rows)
    return Filters(column * temperature, (column * top_k).long(), (column * top_p).float(), (column * min_p).float())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([0.0, 0.21, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.11, 1.0]),
    u=st.floats(0.001, 0.999),
)
def test_draws_what_sorting_draws(logits, temperature, top_k, top_p, min_p, u):
    wanted = survivors([x / 1 for x in logits], temperature, top_k, top_p, min_p)
    below, allowed = 0.0, set()
    for token, p in wanted.items():
        # A draw within rounding of a border may fall on either side.
        if below - 1e-6 <= u <= below + p + 1e-6:
            allowed.add(token)
        below += p
    row = torch.tensor([logits], dtype=torch.float32)
    token = sample(row, filters(temperature, top_k, top_p, min_p), torch.tensor([u]))
    assert token.item() in allowed


def test_frequencies():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.0])
    draws = 1_000
    uniform = (torch.arange(draws) + 0.5) / draws
    tokens = sample(logits.expand(draws, -1), filters(0.8, rows=draws), uniform)
    share = torch.bincount(tokens, minlength=5) / draws
    assert torch.allclose(share, (logits / 0.8).softmax(-1), atol=2 / draws)


def test_ties_go_to_the_lower_id():
    row = torch.zeros(1, 8)
    for k in range(1, 9):
        drawn = {sample(row, filters(1.0, top_k=k), torch.tensor([u])).item() for u in torch.linspace(0.01, 0.99, 50)}
        assert drawn == set(range(k))
    assert sample(row, None, None).item() == 0
    greedy_and_not = Filters(torch.tensor([0.0, 9e-6, 1.0]))
    assert sample(row.expand(3, -1), greedy_and_not, torch.tensor([0.9] * 3)).tolist() == [0, 0, 7]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 100.0])
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 10**6])
@pytest.mark.parametrize("min_p", [0.0, 1.0])
def test_extremes_draw_a_token(temperature, top_p, top_k, min_p):
    row = torch.tensor([[-math.inf, 3.0, -math.inf, 3.5, -50.0]])
    for u in (1e-20, 0.9999999):
        token = sample(row, filters(temperature, top_k, top_p, min_p), torch.tensor([u])).item()
        assert token in (1, 3, 4)
        if temperature < 1e-3 or top_p < 1e-3 or top_k == 1 or min_p == 1:
            assert token == 3


@pytest.mark.parametrize("bad", [[math.nan, 0, 1], [math.inf, 0, 1], [-math.inf] * 3])
def test_a_row_that_is_not_finite_is_marked(bad):
    rows = torch.tensor([[0.0, 1.0, 0.0], bad])
    assert sample(rows, None, None).tolist() == [1, -1]
    assert sample(rows, filters(1e-4, rows=2), torch.tensor([0.5, 0.5])).tolist() == [1, -1]


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 301, generator=generator)
    uniform = torch.rand(5, generator=generator)
    mixed = Filters(
        torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0]),
        torch.tensor([0, 7, 0, 0, 50]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 0.7]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2]),
    )
    together = sample(rows, mixed, uniform).tolist()
    for i in range(5):
        one = Filters(*(column[i : i + 1] for column in (mixed.temperature, mixed.top_k, mixed.top_p, mixed.min_p)))
        assert sample(rows[i : i + 1], one, uniform[i : i + 1]).tolist() == [together[i]]


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    in_prompt = torch.tensor([[True, True, False, False]])
    in_output = torch.tensor([[False, False, True, False]])
    got = penalize(
        logits,
        bias=torch.tensor([[0.0, 0.0, 0.0, 5.0]]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        in_prompt=in_prompt,
        in_output=in_output,
        ending=torch.tensor([[True, False, False, False]]),
        early=torch.tensor([True]),
    )
    assert got.tolist() == [[-math.inf, -4.0, 0.25, 5.0]]
