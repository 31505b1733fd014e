"""Residual addition and RMSNorm in one pass over a row."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm(x, delta, weight, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        # Rounded as the sum is stored: the norm is that of the residual stream as the next layer sees it.
        value = (value + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * scale * gain, mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See ``norm.add_rms_norm``. One program a row."""
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    out = torch.empty_like(x)
    _add_rms_norm[(rows,)](
        x, delta, weight, out, width, eps, delta is not None, block, num_warps=min(16, max(1, block // 512))
    )
    return out
