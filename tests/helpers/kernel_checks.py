"""What the tests of kernels share: shapes, a filled layer of a ring, and the tolerance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringkv.kernels.backend import use
from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles
from ringkv.kernels.table import add_rms_norm

SLOTS, GROUPS, DIMS, DTYPES = (63, 100, 111, 1000), (1, 3, 7, 8), (64, 80, 128), (torch.float32, torch.float16)
# Every pair of two parameters occurs.
SHAPES = [
    (slots, group, DIMS[(i + j) % 3], DTYPES[(i + j // 2) % 2])
    for i, slots in enumerate(SLOTS)
    for j, group in enumerate(GROUPS)
] + [
    (100, 16, 96, torch.float16),
    (63, 7, 256, torch.float32),
    (111, 16, 256, torch.float32),
    (63, 1, 96, torch.float32),
]


def rows_of(script: Path, folder: Path) -> list[dict[str, Any]]:
    """The JSON lines that a script prints, in a process where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of ``dtype`` at the size of ``x``, float64."""
    info = torch.finfo(dtype)
    return torch.clamp(2.0 ** x.abs().double().clamp(min=info.tiny).log2().floor(), min=info.tiny) * info.eps


def assert_as_exact(kernel: Tensor, twin: Tensor, exact: Tensor, terms: int = 16) -> None:
    """The kernel's error against float64 is at most twice the twin's, or what ``terms`` roundings come to.

    Errors are counted in ulp of the row's largest output, and the worst row counts.

    Args:
        terms: of a sum that the operation rounds at each step. Half an ulp each, in random directions, comes to
            sqrt(terms) / 2 ulp, and a lucky twin may show less. Two ulp by default.
    """
    assert kernel.shape == twin.shape == exact.shape
    assert kernel.dtype == twin.dtype
    unit = ulp(exact.abs().amax(-1), kernel.dtype)
    error, own = (float(((each.double() - exact).abs().amax(-1) / unit).max()) for each in (kernel, twin))
    assert error <= max(2 * own, terms**0.5 / 2), f"{error:.3g} ulp; the twin: {own:.3g}"


def widened(value: Any) -> Any:
    """Floats as float64, in tensors, rings and tuples."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(widened(each) for each in value)
    if isinstance(value, Angles):
        return Angles(widened(value.cos), widened(value.sin))
    if isinstance(value, LayerRing):
        return replace(value, **{name: widened(getattr(value, name)) for name in ("k", "v", "queries")})
    return value


def three_ways(
    operation: Callable[..., Any],
    *args: Any,
    path: str = "triton",
    launcher: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """What the kernel gives, the twin, and the twin in float64.

    Args:
        operation: of the table; or the twin of a part of one, and then ``launcher`` is what launches its kernel.
    """
    with use(path):
        kernel = (launcher or operation)(*args, **options)
    with use("torch"):
        twin = operation(*args, **options)
        exact = operation(*(widened(arg) for arg in args), **options)
    return kernel, twin, exact


def summed_and_normed(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What ``add_rms_norm`` makes of a copy of the residual stream: the sum, and its norm."""
    x = x.clone()
    return x, add_rms_norm(x, *rest)


def layer(
    lanes: int, kv_heads: int, group: int, slots: int, d: int, window: int, dtype: torch.dtype, seed: int = 0
) -> LayerRing:
    """A layer whose lanes are all active and evicted before: a permuted order, some slots invisible."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    count = torch.randint(slots // 2, slots, (lanes,), generator=generator, dtype=torch.int32)
    order = torch.stack([torch.randperm(slots, generator=generator) for _ in range(lanes * kv_heads)])
    order = order.view(lanes, kv_heads, slots)
    position = torch.full((lanes, kv_heads, slots), -1, dtype=torch.int32)
    for lane in range(lanes):
        live = order[lane, :, : count[lane]]
        position[lane].scatter_(1, live, torch.arange(int(count[lane]), dtype=torch.int32).expand_as(live) * 3)
    k, v = normal(lanes, kv_heads, slots, d), normal(lanes, kv_heads, slots, d)
    return LayerRing(
        k=k,
        v=v,
        position=position,
        order=order.int(),
        v_range=(v.float().amax(-1) - v.float().amin(-1)),
        queries=normal(lanes, kv_heads * group, window, d),
        count=count,
        evictions=torch.ones(lanes, dtype=torch.int32),
        seen=count.long() * 3 + 1,
        active=torch.ones(lanes, dtype=torch.bool),
    )


def poisoned(ring: LayerRing) -> LayerRing:
    """NaN in every slot that attention must not see."""
    hidden = (ring.position < 0)[..., None]
    return replace(ring, k=ring.k.masked_fill(hidden, torch.nan), v=ring.v.masked_fill(hidden, torch.nan))


def clone(ring: LayerRing) -> LayerRing:
    return replace(ring, **{each.name: getattr(ring, each.name).clone() for each in fields(ring)})


class NoReads(TorchDispatchMode):
    """Fails where a shape or a branch of the host would hang on what the device computed."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = [index for arg in args if isinstance(arg, (list, tuple)) for index in arg]
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices
        )
        if name.startswith(self.READS) or by_mask:
            raise AssertionError(f"the step reads the device: {function}")
        out = function(*args, **(kwargs or {}))
        # A copy to the device waits for it too, unless it is told not to.
        devices = {x.device for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
        if len(devices) > 1 and not (kwargs or {}).get("non_blocking") and "copy" in name.replace("to", "copy"):
            raise AssertionError(f"the step waits for the device: {function}")
        return out
