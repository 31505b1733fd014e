"""The products of a decoder: plain, or with weights packed in half precision for a CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Linear:
    """``x @ weight.T + bias``."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def packed(self) -> PackedLinear:
        """The same product with packed weights."""
        return PackedLinear(self.weight, self.bias)


class PackedLinear:
    """The same product: weights rounded to float16 and packed by FBGEMM, activations and sums in float32.

    A decode step reads every weight once, so its time is mostly that of their bytes; and unlike a product in bfloat16
    this one rounds the weights alone. A row of the result does not depend on the other rows.

    Args:
        weight: float32 [out, in] on a CPU. On the meta device nothing is packed: shapes and bytes are all there is.
        bias: float32 [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, self.bias = weight.shape, bias
        self._pack = None if weight.is_meta else torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self._pack is None:
            return x.new_empty(*x.shape[:-1], self.shape[0])
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._pack)
        return out

    def packed(self) -> PackedLinear:
        """Itself."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights and the bias, without the padding of a last block."""
        return self.shape.numel() * 2 + (0 if self.bias is None else self.bias.nbytes)


AnyLinear: TypeAlias = Linear | PackedLinear


@functools.cache
def can_pack() -> bool:
    """Whether this build of torch, on this processor, has the packed product: asked by computing one."""
    weight, x = torch.eye(3, 5), torch.arange(10, dtype=torch.float32).view(2, 5)
    try:
        return torch.equal(PackedLinear(weight, torch.ones(3))(x), x[:, :3] + 1)
    except (AttributeError, RuntimeError):
        return False
