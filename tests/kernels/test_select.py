"""Victim selection against sorting in Python."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv.kernels.select import partition
from ringkv.kernels.table import lowest

VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, math.inf, -math.inf, math.nan, 1e-45, 3e38])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=30), data=st.data())
def test_lowest_first_then_older(row, data):
    free = [i for i, (_, protected) in enumerate(row) if not protected]
    count = data.draw(st.integers(0, len(free)))
    key = {i: -math.inf if math.isnan(row[i][0]) else row[i][0] for i in free}
    wanted = set(sorted(free, key=lambda i: (key[i], i))[:count])
    priority, protected = (torch.tensor(column) for column in zip(*row, strict=True))
    victim = lowest(priority.float()[None], protected[None], count)[0]
    assert set(victim.nonzero()[:, 0].tolist()) == wanted


def test_partition_is_stable():
    victim = torch.tensor([[True, False, True, False, False]])
    assert partition(victim).tolist() == [[1, 3, 4, 0, 2]]
