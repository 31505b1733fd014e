"""Counting the bytes of tensors while code runs, on any device: on the meta device they are counted and not taken."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while it is active, and when they go.

    Attributes:
        now, peak: bytes of those that are alive, and the most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x) for x in _tensors((args, *(kwargs or {}).values()))}
        out = func(*args, **(kwargs or {}))
        for x in _tensors((out,)):
            if (key := _storage(x)) not in given and key not in self._sizes:
                storage = x.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in the lists of these: what operations take and give."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
