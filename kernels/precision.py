"""How a kernel multiplies float32 matrices; half precision is exact in either way."""

from __future__ import annotations

import torch


def float32_dot() -> str:
    """``input_precision`` of ``tl.dot``: on NVIDIA three tensor-core products that add up to a float32 one."""
    return "ieee" if torch.version.hip else "tf32x3"
