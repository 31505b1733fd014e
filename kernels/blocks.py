"""Blocks: what of a long tensor is computed at once, and what is done between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_pause: ContextVar[Callable[[], object] | None] = ContextVar("ringkv_pause", default=None)


def blocks(n: int, size: int, like: Tensor) -> Iterator[int]:
    """Where the blocks of ``size`` of n rows begin. Between two of them, what ``pausing`` was given is called.

    On the meta device, where memory is counted and nothing is computed, the first two stand for all: while a block is
    computed there is at most what is left of the one before it. So a count takes no time that grows with n.
    """
    for start in range(0, min(n, 2 * size) if like.is_meta else n, size):
        if start and (pause := _pause.get()) is not None:
            pause()
        yield start


@contextmanager
def pausing(pause: Callable[[], object]) -> Iterator[None]:
    """While open, this is called between the blocks of whatever is computed; it may raise to leave it."""
    before = _pause.set(pause)
    try:
        yield
    finally:
        _pause.reset(before)
