from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernel_checks import SHAPES, assert_as_exact, layer, poisoned
from ringkv.kernels.backend import use
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.table import key_scores, lengths, leverage, received_attention, redundancy, window_attention

WINDOW = 5
SCRATCH = torch.empty(1 << 18)


@dataclass
class Storage:
    """Layers and lanes of which some pairs are looked at; what is not live is NaN."""

    queries: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor
    pairs: Pairs

    def logits(self):
        """q.k / sqrt(D) in float64: [P, H, G, w, n]."""
        q = torch.stack([self.queries[pair] for pair in self.pairs]).unflatten(1, (self.k.shape[2], -1)).double()
        return q @ self.live(self.k)[:, :, None].transpose(-1, -2) / self.k.shape[-1] ** 0.5

    def live(self, storage):
        """What ``order`` points at, in float64: [P, H, n, D]."""
        rows = torch.stack([storage[pair] for pair in self.pairs]).double()
        return rows.gather(2, self.order[..., None].expand(-1, -1, -1, rows.shape[-1]))


def check(operation, exact, *args, **options):
    with use("triton"):
        kernel = operation(*args, **options)
    with use("torch"):
        twin = operation(*args, **options)
    assert_as_exact(kernel, twin, exact)
    return kernel


def storage(slots, group, d, dtype):
    layers = [poisoned(layer(2, 2, group, slots, d, WINDOW, dtype, seed)) for seed in range(2)]
    pairs = Pairs([(1, 0), (0, 1)], torch.device("cpu"))
    n = int(min(each.count.min() for each in layers))
    order = torch.stack([layers[a].order[b, :, :n] for a, b in pairs]).long()
    k, v, queries = (torch.stack([getattr(each, name) for each in layers]) for name in ("k", "v", "queries"))
    return Storage(queries, k, v, order, pairs)


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES)
def test_window_attention(slots, group, d, dtype):
    s = storage(slots, group, d, dtype)
    exact = s.logits().softmax(-1).mean(-2).flatten(1, 2)
    check(window_attention, exact, s.queries, s.k, s.order, s.pairs, SCRATCH)


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES[::3])
def test_window_attention_of_one_query(slots, group, d, dtype):
    s, only = storage(slots, group, d, dtype), torch.tensor([3, 0])
    exact = torch.stack([row[:, :, q] for row, q in zip(s.logits(), only, strict=True)]).softmax(-1).flatten(1, 2)
    check(window_attention, exact, s.queries, s.k, s.order, s.pairs, SCRATCH, only=only)


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES[::3])
def test_window_attention_of_the_largest_head(slots, group, d, dtype):
    s = storage(slots, group, d, dtype)
    exact = s.logits().amax(2).softmax(-1).mean(-2)
    check(window_attention, exact, s.queries, s.k, s.order, s.pairs, SCRATCH, group_max=True)


def received(s, position, query_position, since, largest=False):
    unseen = (position[:, :, None] > query_position[:, None, :, None])[:, :, None]  # [P, H, 1, w, n]
    weight = s.logits().masked_fill(unseen, -torch.inf).softmax(-1)
    weight = weight.masked_fill((query_position < since[:, None])[:, None, None, :, None], 0)
    return weight.amax(2).sum(2) if largest else weight.sum(3).mean(2)


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES[::3])
def test_received_attention(slots, group, d, dtype):
    s = storage(slots, group, d, dtype)
    n = s.order.shape[-1]
    position = 3 * torch.arange(n).expand(2, 2, n)
    # The ring's queries stand in no order; the first of these would see nothing at all, and does not count.
    query_position = torch.tensor([[3 * n - 3, -4, 3 * n - 9, 3 * n - 6, 2], [3 * n, 3 * n - 1, -2, 30, 31]])
    rest = position, query_position, torch.tensor([0, 31])
    check(received_attention, received(s, *rest), s.queries, s.k, s.order, s.pairs, SCRATCH, *rest)
    exact = received(s, *rest, largest=True)
    check(received_attention, exact, s.queries, s.k, s.order, s.pairs, SCRATCH, *rest, group_max=True)


def test_more_queries_than_a_block_and_a_prompt_whose_keys_are_a_view():
    n, heads, group, d = 150, 2, 3, 64
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, h, d, generator=generator).transpose(0, 1)[None, None] for h in (heads * group, heads))
    s = Storage(q, k, k, torch.arange(n).expand(1, heads, n), Pairs([(0, 0)], torch.device("cpu")))
    assert not k.is_contiguous()
    exact = s.logits().softmax(-1).mean(-2).flatten(1, 2)
    check(window_attention, exact, q, k, s.order, s.pairs, SCRATCH)
    rest = torch.arange(n).expand(1, heads, n), torch.arange(n)[None], torch.tensor([20])
    check(received_attention, received(s, *rest), q, k, s.order, s.pairs, SCRATCH, *rest)
    exact = received(s, *rest, largest=True)
    check(received_attention, exact, q, k, s.order, s.pairs, SCRATCH, *rest, group_max=True)


@pytest.mark.parametrize("slots, group, d, dtype", [case for case in SHAPES if case[1] in (1, 7)])
def test_leverage(slots, group, d, dtype):
    s = storage(slots, group, d, dtype)
    projection = torch.randn(2, d, 20, generator=torch.Generator().manual_seed(1)) * 20**-0.5
    k, v = ((s.live(x) @ projection[:, None].double()).square().sum(-1) for x in (s.k, s.v))
    elsewhere = s.v.transpose(2, 3).contiguous().transpose(2, 3)  # a prompt's values lie otherwise than its keys
    check(leverage, k * v, s.k, elsewhere, s.order, s.pairs, SCRATCH, projection)


@pytest.mark.parametrize("slots, group, d, dtype", SHAPES[::3])
@pytest.mark.parametrize("rows", [0, 70])
def test_key_scores(slots, group, d, dtype, rows):
    s = storage(slots, group, d, dtype)
    noise = torch.Generator().manual_seed(1)
    linear, moduli = (torch.randn(2, 2 * group, width, generator=noise) for width in (d, d // 2))
    squared = torch.randn(2, 2 * group, rows, d, generator=noise) / (1 + rows) if rows else None
    keys = s.live(s.k).repeat_interleave(group, 1)  # [P, Hq, n, D]
    exact = (keys @ linear[..., None].double())[..., 0]
    if squared is None:
        exact = exact + (torch.hypot(*keys.chunk(2, -1)) * moduli[:, :, None]).sum(-1)
    else:
        exact = exact + (keys @ squared.double().transpose(-1, -2)).square().sum(-1)
    check(key_scores, exact, s.k, s.order, s.pairs, SCRATCH, linear, squared, None if rows else moduli)


@pytest.mark.parametrize("slots, group, d, dtype", [case for case in SHAPES if case[1] in (1, 7)])
def test_lengths(slots, group, d, dtype):
    s = storage(slots, group, d, dtype)
    elsewhere = s.v.transpose(2, 3).contiguous().transpose(2, 3)
    check(lengths, s.live(s.v).norm(dim=-1), elsewhere, s.order, s.pairs, SCRATCH)


def alike(slots, group, d, dtype):
    """Keys that resemble each other, so that there are matches to leave out; not too many, as all pairs are."""
    s = storage(slots, group, d, dtype)
    s.order = s.order[..., :300]
    s.k[:, :, :, ::3] += 2 * torch.randn(d, generator=torch.Generator().manual_seed(3)).to(dtype)
    return s


def column_means(s, threshold):
    keys = s.live(s.k)
    keys = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosine = keys @ keys.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    for head in cosine.flatten(0, 1):
        for row in head:
            match = (row > threshold).nonzero()
            row[int(match.max()) if len(match) else 0] = 0
    return cosine.mean(-2)


@pytest.mark.parametrize("slots, group, d, dtype", [case for case in SHAPES if case[1] in (1, 7)])
def test_redundancy(slots, group, d, dtype):
    s = alike(slots, group, d, dtype)
    exact = column_means(s, 0.5)
    check(redundancy, exact, s.k, s.order, s.pairs, SCRATCH, 0.5)
    # Something is left out: without the rule the means differ by far more than rounding.
    assert (exact - column_means(s, 2.0)).abs().max() > 1e-3


def test_a_cosine_at_the_threshold_is_no_match():
    """Of keys a, a, b each row's match is the other a; b, at cosine 0, is none, and nothing is left to count."""
    k = torch.zeros(1, 1, 1, 3, 64)
    k[..., [0, 1], 0] = k[..., 2, 1] = 2
    with use("triton"):
        got = redundancy(k, torch.arange(3)[None, None], Pairs([(0, 0)], torch.device("cpu")), SCRATCH, 0.0)
    assert (got == 0).all()


def test_redundancy_with_a_threshold_that_the_diagonal_passes():
    s = alike(63, 1, 64, torch.float32)
    check(redundancy, column_means(s, -0.5), s.k, s.order, s.pairs, SCRATCH, -0.5)


def test_too_many_queries_for_the_scratch_are_refused():
    s = storage(63, 1, 64, torch.float32)
    with use("triton"), pytest.raises(MemoryError):
        window_attention(s.queries, s.k, s.order, s.pairs, torch.empty(7))
