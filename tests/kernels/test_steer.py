"""Thought budgets and forced tokens against a plain loop over one lane."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv.engine.sampling.steering import Steering

OPEN, CLOSE, CPU = 1, 2, torch.device("cpu")


def plain(drawn: list[int], inside: bool, budget: int | None, message: list[int]) -> list[int]:
    out: list[int] = []
    phase, left = ("in" if inside else "before"), budget
    queue = [*message, CLOSE] if inside and budget == 0 else []
    for token in drawn:
        forced = bool(queue)
        token = queue.pop(0) if forced else token
        out.append(token)
        if phase == "before" and token == OPEN:
            phase = "in"
        elif phase == "in" and token == CLOSE:
            phase, queue = "after", []
        elif phase == "in" and token != OPEN and not forced and left:
            left -= 1
        if phase == "in" and left == 0 and not queue:
            queue = [*message, CLOSE]
    return out


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    lanes=st.lists(
        st.tuples(
            st.lists(st.integers(1, 5), min_size=12, max_size=12),
            st.booleans(),
            st.none() | st.integers(0, 5),
            st.lists(st.integers(6, 8), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_lanes_equal_the_plain_loop(lanes):
    steering = Steering(len(lanes), (OPEN, CLOSE), CPU)
    for lane, (_, inside, budget, message) in enumerate(lanes):
        steering.set(lane, inside, budget, message)
    rows = [steering.apply(torch.tensor([drawn[step] for drawn, *_ in lanes]))[0].tolist() for step in range(12)]
    for lane, (drawn, inside, budget, message) in enumerate(lanes):
        assert [row[lane] for row in rows] == plain(drawn, inside, budget, message)


@pytest.mark.parametrize("behind", [0, 1])
def test_closing_lets_one_more_token_of_the_model_through(behind):
    steering = Steering(1, (OPEN, CLOSE), CPU)
    steering.set(0, True, None, [7])
    tokens = [steering.apply(torch.tensor([5]))[0].item() for _ in range(3)]
    if behind:
        tokens.append(steering.apply(torch.tensor([5]))[0].item())
    steering.close(0, behind)  # the host has seen the third
    tokens += [steering.apply(torch.tensor([5]))[0].item() for _ in range(6 - len(tokens) + 1)]
    assert tokens == [5, 5, 5, 5, 7, CLOSE, 5]


def test_a_row_that_is_not_finite_stays_marked():
    steering = Steering(1, (OPEN, CLOSE), CPU)
    steering.set(0, True, 0, [])
    assert steering.apply(torch.tensor([-1]))[0].item() == -1
    assert steering.apply(torch.tensor([5]))[0].item() == CLOSE
