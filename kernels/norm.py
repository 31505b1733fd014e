"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis; the mean in float32 or better."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` (None at the first layer) to the residual stream ``x`` [n, hidden], in place; return its norm."""
    if delta is not None:
        x += delta
    return rms_norm(x, weight, eps)
