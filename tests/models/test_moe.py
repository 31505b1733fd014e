"""The sparse MLP, against the sum over experts written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.models.moe import FEW_ROWS, SparseMlp

EXPERTS, HIDDEN, SIZE = 6, 16, 12


def mlp(normalize: bool = True, picks: int = 2, dtype: torch.dtype = torch.float64) -> SparseMlp:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return SparseMlp(
        random(EXPERTS, HIDDEN), random(EXPERTS, 2 * SIZE, HIDDEN), random(EXPERTS, HIDDEN, SIZE), picks, normalize
    )


def naive(mlp: SparseMlp, token: Tensor) -> Tensor:
    """One token [hidden], every expert run, those that were not chosen weighted with 0."""
    share = (mlp.router @ token).softmax(dim=0)
    weight = torch.where(share >= share.sort(descending=True).values[mlp.experts_per_token - 1], share, 0.0)
    if mlp.normalize:
        weight = weight / weight.sum()
    gate, up = (mlp.gate_up @ token).chunk(2, dim=-1)
    return (weight[:, None] * (mlp.down @ (F.silu(gate) * up)[..., None])[..., 0]).sum(dim=0)


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(("normalize", "picks"), [(True, 2), (False, 2), (False, 1), (True, EXPERTS)])
def test_equal_to_the_written_out_sum(rows: int, normalize: bool, picks: int) -> None:
    sparse = mlp(normalize, picks)
    x = torch.randn(rows, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sparse(x), torch.stack([naive(sparse, row) for row in x]), rtol=1e-12, atol=1e-12)


def test_a_token_in_decode_does_not_feel_its_neighbours() -> None:
    sparse = mlp(dtype=torch.float32)
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    weight, chosen = sparse.route(x)
    together = sparse._by_token(x, weight, chosen)
    for row in range(8):
        alone = sparse._by_token(x[row : row + 1], weight[row : row + 1], chosen[row : row + 1])
        assert torch.equal(together[row], alone[0])


def test_the_router_works_in_float32() -> None:
    sparse = mlp(dtype=torch.bfloat16)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight, chosen = sparse.route(x)
    share = F.linear(x, sparse.router).float().softmax(dim=-1)
    wanted = share.gather(1, chosen)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, (wanted / wanted.sum(dim=-1, keepdim=True)).to(torch.bfloat16))
