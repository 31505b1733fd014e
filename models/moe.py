"""The sparse MLP of a mixture of experts (qwen3_moe)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.table import silu_mul

# Up to here tokens go through their experts one by one, as in decode: a token's result then depends on no other
# row, shapes are static, and the host reads nothing. A prompt is cheaper expert by expert.
FEW_ROWS = 64


@dataclass
class SparseMlp:
    """Each token runs through its best ``experts_per_token`` of E gated MLPs, weighted by a softmax router."""

    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 * intermediate, hidden]
    down: Tensor  # [E, hidden, intermediate]
    experts_per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x)
        return self._by_token(x, weight, chosen) if len(x) <= FEW_ROWS else self._by_expert(x, weight, chosen)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n, hidden] -> the weights and the experts [n, k] of each; the softmax in float32 or better."""
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
