"""The gated activation of the MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of a fused projection [n, 2 * intermediate] -> [n, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
