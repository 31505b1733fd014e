"""The products of a decoder: plain, or with weights packed in half precision for a CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 512  # inputs that FBGEMM packs together; it fills the last block of them with zeros


@dataclass
class Linear:
    """``x @ weight.T + bias``."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same product: weights rounded to float16 and packed by FBGEMM, activations and sums in float32.

    A decode step reads every weight once, so its time is mostly that of their bytes; and unlike a product in bfloat16
    this one rounds the weights alone. A row of the result does not depend on the other rows.

    It is made without weights, which ``pack`` sets and replaces: so the decoder can be built first, and then filled
    product by product, and what a product was packed from need not outlive it.

    Args:
        shape: (out, in) of the weights.
        bias: float32 [out], or None; it is kept as it is, and may be set later.

    Attributes:
        nbytes: bytes of the packed weights, with what fills the last block of inputs; 0 before there are any.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        self.shape, self.bias, self.nbytes = torch.Size(shape), bias, 0
        self._packed: Any = None

    def pack(self, weight: Tensor) -> None:
        """Take these weights, float32 [out, in] on a CPU, in place of those it had.

        On the meta device nothing can be packed, and a tensor of as many bytes stands for the packed weights.
        """
        assert weight.shape == self.shape
        size = self.shape[0], -(-self.shape[1] // BLOCK) * BLOCK
        if weight.is_meta:
            self._packed = torch.empty(size, dtype=torch.float16, device="meta")
        else:
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)
        self.nbytes = 2 * size[0] * size[1]

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.shape[0])
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


AnyLinear: TypeAlias = Linear | PackedLinear


@functools.cache
def can_pack() -> bool:
    """Whether this build of torch, on this processor, has the packed product: asked by computing one."""
    product, x = PackedLinear((3, 5), torch.ones(3)), torch.arange(10, dtype=torch.float32).view(2, 5)
    try:
        product.pack(torch.eye(3, 5))
        return torch.equal(product(x), x[:, :3] + 1)
    except (AttributeError, RuntimeError):
        return False
