"""The gated activation of the MLP."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, gate / (1 + tl.exp(-gate)) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``silu.silu_mul``."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK)
    return out
