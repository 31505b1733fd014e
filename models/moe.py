"""The sparse MLP of a mixture of experts (qwen3_moe)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.table import silu_mul

# Up to so many rows, as in decode, each token runs through its own experts: its result then depends on no other row,
# the shapes are static, and the host reads nothing. For a prompt it is cheaper to go expert by expert.
FEW_ROWS = 64


@dataclass
class SparseMlp:
    """E gated MLPs; each token runs through the ``experts_per_token`` that a softmax router ranks highest."""

    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 * intermediate, hidden]
    down: Tensor  # [E, hidden, intermediate]
    experts_per_token: int
    normalize: bool  # whether the weights of the chosen experts are scaled to sum to 1

    def __call__(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x)
        return self._by_token(x, weight, chosen) if len(x) <= FEW_ROWS else self._by_expert(x, weight, chosen)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the indices [n, k] of the experts of tokens [n, hidden]; the softmax is at least float32."""
        logits = F.linear(x, self.router)
        share = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(dim=-1)
        weight, chosen = share.topk(self.experts_per_token, dim=-1)
        if self.normalize:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        return weight.to(x.dtype), chosen

    def _by_token(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for row, experts in enumerate(chosen):
            h = silu_mul(self.gate_up[experts] @ x[row])  # [k, intermediate]
            out[row] = weight[row] @ (self.down[experts] @ h[..., None]).squeeze(-1)
        return out

    def _by_expert(self, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, rank = (chosen == expert).nonzero(as_tuple=True)
            h = F.linear(silu_mul(F.linear(x[row], self.gate_up[expert])), self.down[expert])
            out.index_add_(0, row, h * weight[row, rank, None])
        return out
