"""Philox4x32-10 on a GPU: triton's own, which computes the same words."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _at(pointer, x, y, z, sx, sy, sz, mask):
    return tl.load(pointer + x * sx + y * sy + z * sz, mask=mask, other=0)


# Sizes, strides and addresses differ from one use to the next: a single variant serves all of them.
_ARGUMENTS = ["seed", "total", "ny", "nz", *(f"{c}_{axis}" for c in ("seed", "c0", "c1", "c2", "c3") for axis in "xyz")]


# fmt: off
@triton.jit(do_not_specialize=["c0", "c1", "c2", "c3", *_ARGUMENTS])
def _philox(
    seed, c0, c1, c2, c3, out, total, ny, nz,
    seed_x, seed_y, seed_z, c0_x, c0_y, c0_z, c1_x, c1_y, c1_z, c2_x, c2_y, c2_z, c3_x, c3_y, c3_z,
    BLOCK: tl.constexpr,
):
    # fmt: on
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    x, y, z = at // (ny * nz), at // nz % ny, at % nz
    a, b, c, d = tl.philox(
        _at(seed, x, y, z, seed_x, seed_y, seed_z, mask).to(tl.uint64),
        _at(c0, x, y, z, c0_x, c0_y, c0_z, mask).to(tl.uint32),
        _at(c1, x, y, z, c1_x, c1_y, c1_z, mask).to(tl.uint32),
        _at(c2, x, y, z, c2_x, c2_y, c2_z, mask).to(tl.uint32),
        _at(c3, x, y, z, c3_x, c3_y, c3_z, mask).to(tl.uint32),
    )
    tl.store(out + at, a.to(tl.int64), mask=mask)
    tl.store(out + total + at, b.to(tl.int64), mask=mask)
    tl.store(out + 2 * total + at, c.to(tl.int64), mask=mask)
    tl.store(out + 3 * total + at, d.to(tl.int64), mask=mask)


def philox(seed: Tensor, c0: Tensor | int, c1: Tensor | int, c2: Tensor | int, c3: Tensor | int) -> tuple[Tensor, ...]:
    """See ``philox.philox``; up to three dimensions, read where they lie."""
    words = torch.broadcast_tensors(
        *(c if isinstance(c, Tensor) else seed.new_full((), c) for c in (seed, c0, c1, c2, c3))
    )
    shape = words[0].shape
    words = [word.expand((1,) * (3 - len(shape)) + shape) for word in words]
    total = shape.numel()
    out = torch.empty(4, *shape, dtype=torch.int64, device=seed.device)
    strides = [stride for word in words for stride in word.stride()]
    _philox[(triton.cdiv(total, BLOCK),)](*words, out, total, *words[0].shape[1:], *strides, BLOCK)
    return out.unbind(0)
