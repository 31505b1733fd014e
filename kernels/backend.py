"""Which path an operation takes: its torch twin, its Triton kernel, or compiled C.

An operation is one function, its torch twin, marked ``@dispatched``. Where the tensors lie on a GPU, a call goes to the
launcher of the same name and signature in the file beside it: ``append.append`` to ``append_triton.append``. Only then
is triton imported, so a machine without it, or without a GPU, never misses it. On the native path, a CPU's, a call goes
to the launcher of its name in ``native.py``; an operation that has none there is its twin.
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
from ringkv.kernels.compiled import CannotCompile

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton", "native")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_choice: ContextVar[str] = ContextVar("ringkv_backend", default="auto")


def dispatched(twin: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of a torch twin. Its first argument must be the tensor whose device decides, given by position."""
    module, name = f"{twin.__module__}_triton", twin.__name__

    @functools.cache
    def native() -> Callable[_P, _R]:
        return getattr(importlib.import_module("ringkv.kernels.native"), name, twin)

    @functools.wraps(twin)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        x = args[0]
        assert isinstance(x, Tensor)
        path = path_of(x)
        if path == "torch":
            return twin(*args, **kwargs)
        if path == "native":
            return native()(*args, **kwargs)
        launcher: Callable[_P, _R] = getattr(importlib.import_module(module), name)
        with torch.cuda.device_of(x):
            return launcher(*args, **kwargs)

    return operation


def path_of(x: Tensor) -> str:
    """How operations on ``x`` run: "torch", "triton" or "native"."""
    choice = _choice.get()
    return _automatic(x.device, x.dtype) if choice == "auto" else choice


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
    """The path "torch", "triton" or "native" of an engine on this device, computing in this dtype.

    Raises:
        RingkvError: one that cannot run here.
    """
    check(backend)
    if backend == "native":
        if device.type != "cpu" or dtype != torch.float32:
            kind = str(dtype).removeprefix("torch.")
            raise RingkvError(f"backend: 'native' computes in float32 on a CPU; this is {kind} on {device.type}")
        if (missing := _not_compiled()) is not None:
            raise RingkvError(f"backend: 'native' needs a C compiler with OpenMP: {missing}")
    if backend == "triton":
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RingkvError("backend: 'triton' needs a GPU, the device is cpu; accepted are auto, torch and native")
        if dtype == torch.float64:
            raise RingkvError("backend: 'triton' computes in float32, float16 and bfloat16, not in float64")
        if not _installed():
            raise RingkvError("backend: 'triton' is not installed; run: pip install triton")
    return _automatic(device, dtype) if backend == "auto" else backend


def _automatic(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return "triton" if dtype != torch.float64 and _found() else "torch"
    return "native" if device.type == "cpu" and dtype == torch.float32 and _not_compiled() is None else "torch"


@functools.cache
def _not_compiled() -> str | None:
    """Why there is no compiled C here; None where there is."""
    try:
        importlib.import_module("ringkv.kernels.native").library()
    except CannotCompile as error:
        log.info("a CPU runs the torch path, which is slower: %s", error)
        return str(error)
    return None


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
