"""What a CPU runs as compiled C (``c/``), where there is a compiler: a step, the draw, the attention of a prompt.

A launcher that has the name of a torch twin has its signature. They take float32 tensors.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks
from ringkv.kernels.compiled import load
from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles
from ringkv.kernels.sample import GREEDY_BELOW, Filters

AT_ONCE = 1 << 24  # floats of keys that the tasks of one call go through, so that it takes a fraction of a second
EXPONENTIALS = 64  # as many floats of a key take as long as the rest of the work for it
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

_TABLES = {
    **dict.fromkeys(("k", "v", "v_range", "queries"), torch.float32),
    **dict.fromkeys(("position", "order", "count", "evictions"), torch.int32),
    "seen": torch.int64,
    "active": torch.bool,
}
_SIZES = ("lanes", "kv_heads", "group", "slots", "window", "d")


class RingPointers(ctypes.Structure):
    """``Ring`` of step.c."""

    _fields_ = [(name, _POINTER) for name in _TABLES] + [(name, _LONG) for name in _SIZES]


class NativeLayer:
    """A layer of the ring as C sees it, and what does not change from step to step."""

    def __init__(self, ring: LayerRing) -> None:
        tables = [getattr(ring, name) for name in _TABLES]
        for table, dtype in zip(tables, _TABLES.values(), strict=True):
            assert table.dtype == dtype
            assert table.is_contiguous()  # a copy would lose what is written to it
        lanes, kv_heads, slots, d = ring.k.shape
        heads, window = ring.queries.shape[1:3]
        sizes = lanes, kv_heads, heads // kv_heads, slots, window, d
        self.pointers = RingPointers(*(table.data_ptr() for table in tables), *sizes)
        self.width = heads * d
        self.scratch_size: int = library().scratch_size(self.pointers)
        self.scale = d**-0.5


_layers: WeakKeyDictionary[LayerRing, NativeLayer] = WeakKeyDictionary()

_RING = ctypes.POINTER(RingPointers)
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "add_rms_norm": ([_POINTER] * 4 + [_LONG, _LONG, _FLOAT, _INT], None),
    "silu_mul": ([_POINTER, _POINTER, _LONG, _LONG, _INT], None),
    "attend": ([_POINTER] * 6 + [_RING, _FLOAT, _FLOAT, _POINTER, _INT], _INT),
    "scratch_size": ([_RING], _LONG),
    "causal_attention": (
        [_POINTER, _LONG] * 3 + [_POINTER] + [_LONG] * 4 + [_FLOAT, _POINTER, _INT] + [_LONG] * 2,
        None,
    ),
    "causal_tasks": ([_LONG] * 3, _LONG),
    "causal_scratch": ([_LONG, _LONG], _LONG),
    "philox": ([_POINTER] * 5 + [_LONG, _POINTER, _INT], None),
    "sample": ([_POINTER] * 2 + [_LONG] * 3 + [_POINTER] * 5 + [_FLOAT, _POINTER, _INT], None),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled functions.

    Raises:
        CannotCompile: see ``compiled.load``.
    """
    functions = load(Path(__file__).with_name("c"), _SIGNATURES)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, result
    return functions


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See ``norm.add_rms_norm``."""
    out = torch.empty_like(x)
    library().add_rms_norm(*_pointers(x, delta, weight, out), *x.shape, eps, torch.get_num_threads())
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``silu.silu_mul``."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    library().silu_mul(*_pointers(gate_up, out), rows, width // 2, torch.get_num_threads())
    return out


def attend(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, ring: LayerRing) -> Tensor:
    """See ``attention.attend``."""
    own = _layers.get(ring) or _layers.setdefault(ring, NativeLayer(ring))
    out, scratch = qkv.new_empty(len(qkv), own.width), qkv.new_empty(own.scratch_size)
    tensors = _pointers(qkv, *(norms or (None, None)), angles.cos, angles.sin, out)
    written = library().attend(*tensors, own.pointers, eps, own.scale, scratch.data_ptr(), torch.get_num_threads())
    assert written, "a lane is full"
    return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scratch: Tensor) -> Tensor:
    """See ``prefill_attention.causal_attention``. A token's row may be part of a longer one."""
    for x in (q, k, v):
        assert x.dtype == torch.float32
        assert x.stride()[1:] == (x.shape[2], 1)
    (n, heads, d), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    threads = min(torch.get_num_threads(), scratch.numel() // library().causal_scratch(group, d))
    assert threads > 0
    out = q.new_empty(n, heads * d)
    rows = (each for x in (q, k, v) for each in (x.data_ptr(), x.stride(0)))
    arguments = *rows, out.data_ptr(), n, kv_heads, group, d, d**-0.5, *_pointers(scratch), threads
    tasks = library().causal_tasks(n, kv_heads, group)
    at_once = max(2 * threads, AT_ONCE // (n * max(d, EXPONENTIALS)))
    for first in blocks(tasks, at_once, q):
        library().causal_attention(*arguments, first, min(first + at_once, tasks))
    return out


def philox(seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int) -> tuple[Tensor, ...]:
    """See ``philox.philox``."""
    counters = (torch.as_tensor(c, dtype=torch.int64) for c in (c0, c1, c2, c3))
    words = [word.contiguous() for word in torch.broadcast_tensors(seed, *counters)]
    out = seed.new_empty(4, *words[0].shape)
    pointers = _pointers(*words, dtype=torch.int64)
    library().philox(*pointers, words[0].numel(), out.data_ptr(), torch.get_num_threads())
    return out.unbind(0)


def sample(logits: Tensor, filters: Filters | None, uniform: Tensor | None) -> Tensor:
    """See ``sample.sample``. Rows may lie apart, as in a padded vocabulary."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    rows, n = logits.shape
    threads = min(rows, torch.get_num_threads())
    token, scratch = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(threads * n)
    drawn: list[int | None] = [None] * 5
    if filters is not None and uniform is not None:
        temperature, top_p, min_p, noise = _pointers(filters.temperature, filters.top_p, filters.min_p, uniform)
        drawn = [temperature, *_pointers(filters.top_k, dtype=torch.int64), top_p, min_p, noise]
    sizes = rows, n, logits.stride(0)
    library().sample(logits.data_ptr(), token.data_ptr(), *sizes, *drawn, GREEDY_BELOW, scratch.data_ptr(), threads)
    return token


def _pointers(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> list[int | None]:
    """Where tensors lie; None, for C a null pointer, for those that are not there."""
    for x in tensors:
        assert x is None or (x.dtype == dtype and x.is_contiguous())
    return [None if x is None else x.data_ptr() for x in tensors]
