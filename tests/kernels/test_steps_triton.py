"""Small kernels of a step that move and count: exact."""

from __future__ import annotations

import torch

from ringkv.kernels.backend import use
from ringkv.kernels.steer import AFTER, BEFORE, IDLE, INSIDE, NEXT
from ringkv.kernels.table import advance, commit, steer


def both(operation, *args):
    """Results and arguments afterwards, of the kernel and of the twin."""
    results = []
    for backend in ("triton", "torch"):
        own = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        with use(backend):
            out = operation(*own)
        results.append([*(out if isinstance(out, tuple) else (out,)), *own])
    return results


def equal(kernel, twin):
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(kernel, twin, strict=True))


def test_advance():
    active = torch.tensor([True, False, True, True, False])
    count = torch.arange(5 * 70, dtype=torch.int32).view(70, 5)
    kernel, twin = both(advance, active, count, torch.tensor([5, 6, 7, 8, 9]))
    assert equal(kernel, twin)
    assert kernel[3].tolist() == [6, 6, 8, 9, 9]


def test_commit_stops_a_lane_that_was_not_finite():
    token, active = torch.tensor([3, 4, -1, 0, 8]), torch.tensor([True, False, True, True, False])
    kernel, twin = both(commit, token, active, torch.full((5,), 77))
    assert equal(kernel, twin)
    out, _, active, following = kernel
    assert out.tolist() == following.tolist() == [3, -1, -1, 0, -1]
    assert active.tolist() == [True, False, False, True, False]


def test_steer_in_every_state():
    opened, closed, other = 1, 2, 5
    states = torch.cartesian_prod(
        torch.tensor([-1, opened, closed, other]),  # drawn
        torch.tensor([NEXT, IDLE, 0, 1, 2]),  # cursor
        torch.tensor([-1, 0, 1, 4]),  # left
        torch.tensor([BEFORE, INSIDE, AFTER]),
    )
    token, cursor, left, phase = states.T.contiguous()
    queue, length = torch.tensor([[8, 9, closed]]).repeat(len(token), 1), torch.full_like(token, 3)
    assert equal(*both(steer, token, queue, length, cursor, left, phase, opened, closed))
