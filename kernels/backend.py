"""Which path an operation takes: its Triton kernel or its torch twin.

An operation is one function, its torch twin, marked ``@dispatched``. Where the tensors lie on a GPU, a call goes to the
launcher of the same name and signature in the file beside it: ``append.append`` to ``append_triton.append``. Only then
is triton imported, so a machine without it, or without a GPU, never misses it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ringkv.errors import RingkvError

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_choice: ContextVar[str] = ContextVar("ringkv_backend", default="auto")


def dispatched(twin: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of a torch twin. Its first argument must be the tensor whose device decides, given by position."""
    module, name = f"{twin.__module__}_triton", twin.__name__

    @functools.wraps(twin)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        x = args[0]
        assert isinstance(x, Tensor)
        if not runs_triton(x):
            return twin(*args, **kwargs)
        launcher: Callable[_P, _R] = getattr(importlib.import_module(module), name)
        with torch.cuda.device_of(x):
            return launcher(*args, **kwargs)

    return operation


def runs_triton(x: Tensor) -> bool:
    """Whether operations on ``x`` run as Triton kernels."""
    choice = _choice.get()
    return choice == "triton" or (choice == "auto" and _automatic(x.device, x.dtype))


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within the block, in this thread, take this path whatever the device. Must not enclose a ``yield``.

    Kernels run on CPU tensors where TRITON_INTERPRET was set before triton was imported.
    """
    token = _choice.set(backend)
    try:
        yield
    finally:
        _choice.reset(token)


def check(backend: object) -> None:
    """Refuse what names no path."""
    if backend not in BACKENDS:
        raise RingkvError.bad("backend", backend, ", ".join(BACKENDS))


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The path "torch" or "triton" of an engine on this device, computing in this dtype.

    Raises:
        RingkvError: "triton" where it cannot run.
    """
    check(backend)
    if backend == "triton":
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RingkvError("backend: 'triton' needs a GPU, the device is cpu; accepted are auto and torch")
        if dtype == torch.float64:
            raise RingkvError("backend: 'triton' computes in float32, float16 and bfloat16, not in float64")
        if not _installed():
            raise RingkvError("backend: 'triton' is not installed; run: pip install triton")
    if backend == "auto":
        return "triton" if _automatic(device, dtype) else "torch"
    return backend


def _automatic(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float64 and _found()


@functools.cache
def _found() -> bool:
    """Whether triton can be imported; says so once where it cannot."""
    if not _installed():
        log.warning("triton is not installed: the GPU runs the torch path, which is slower")
    return _installed()


@functools.cache
def _installed() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True
