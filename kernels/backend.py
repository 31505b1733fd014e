"""Which path an operation takes: its torch twin, its Triton kernel, or compiled C.

An operation is called by its name in ``table.py``. Its first argument decides by the device it lies on, unless ``use``
says otherwise. Launchers are imported when a path is first taken, so a machine without triton, or without a compiler,
never misses them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.kernels.compiled import CannotCompile

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton", "native")
MISSING = None  # in the table: this path has no launcher, and runs the torch twin

_P = ParamSpec("_P")
_R = TypeVar("_R")
_choice: ContextVar[str] = ContextVar("ringkv_backend", default="auto")
OPERATIONS: dict[str, Operation[Any, Any]] = {}  # by name, in the order of the table


class Operation(Generic[_P, _R]):
    """One operation on every path; calling it takes the path that its first argument asks for.

    Args:
        twin: the torch function. Its first argument must be a tensor, given by position.
        triton, native: the modules below ``ringkv.kernels`` that hold a launcher of the twin's name and signature, or
            ``MISSING``.
    """

    def __init__(self, twin: Callable[_P, _R], *, triton: str | None, native: str | None) -> None:
        self.twin, self.name = twin, twin.__name__
        self.modules = {"triton": triton, "native": native}
        assert self.name not in OPERATIONS
        OPERATIONS[self.name] = self

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        x = args[0]
        assert isinstance(x, Tensor)
        path = path_of(x)
        launcher: Callable[_P, _R] = launchers(path)[self.name]
        if path != "triton":
            return launcher(*args, **kwargs)
        with torch.cuda.device_of(x):
            return launcher(*args, **kwargs)


@functools.cache
def launchers(path: str) -> dict[str, Callable[..., Any]]:
    """What carries out every operation on a path, by name.

    Raises:
        AttributeError: the table names a launcher that its module does not have.
    """
    found = {name: operation.twin for name, operation in OPERATIONS.items()}
    for name, operation in OPERATIONS.items():
        if (module := operation.modules.get(path)) is not MISSING:
            found[name] = getattr(importlib.import_module(f"ringkv.kernels.{module}"), name)
    return found


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
    if device.type == "cuda" and dtype == torch.float64:
        raise RingkvError("dtype: 'float64' is computed on a CPU only; a GPU accepts float32, float16 and bfloat16")
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
        if (why := _no_triton(device)) is not None:
            raise RingkvError(f"backend: 'triton' cannot run here: {why}")
    return _automatic(device, dtype) if backend == "auto" else backend


def _automatic(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        return "triton" if dtype != torch.float64 and _no_triton(device) is None else "torch"
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
def _no_triton(device: torch.device) -> str | None:
    """Why no kernel can be launched on a device; None where one can, which is found out by launching one."""
    try:
        importlib.import_module("triton")
        with use("triton"):
            OPERATIONS["philox"](torch.zeros(1, dtype=torch.int64, device=device), 0, 0, 0, 0)
    except ImportError:
        why = "triton is not installed; run: pip install triton"
    except Exception as error:  # no C compiler, a GPU that is too old, and whatever else a driver may say
        why = next(iter(str(error).splitlines()), type(error).__name__)
    else:
        return None
    log.warning("a GPU runs the torch path, which is slower: %s", why)
    return why
