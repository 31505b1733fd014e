"""Block-wise FP8 (``quant_method: fp8``): what is accepted of it, and its dequantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringkv.models.keys import Keys

SCALE = "_scale_inv"  # after the name of an FP8 weight: its scales [ceil(rows/R), ceil(columns/C)]


def block_size(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, from the value of ``quantization_config``; None where there is none.

    Raises:
        RingkvError: another quantisation, named by its method, or FP8 of another form.
    """
    if quantization is None:
        return None
    keys = Keys(quantization, "quantization_config.")
    if keys.raw("quant_method", None) != "fp8":
        raise keys.refuse("quant_method", '"fp8" with weight_block_size, or no quantization')
    block = keys.integers("weight_block_size", None, high=1 << 20)
    if len(block) != 2 or 0 in block:
        raise keys.refuse("weight_block_size", "two positive ints")
    keys.choice("activation_scheme", ("dynamic",), "dynamic")
    keys.choice("fmt", ("e4m3",), "e4m3")
    # Which weights are FP8 is read from the files themselves.
    keys.finish(("modules_to_not_convert", "ignored_layers", "dequantize"))
    return block[0], block[1]


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int], first_row: int) -> Tensor:
    """Rows [n, columns] of an FP8 weight from ``first_row`` on, times the scales of its blocks, in float32."""
    rows = (torch.arange(len(weight)) + first_row) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.to(torch.float32) * scale.to(torch.float32)[rows][:, columns]
