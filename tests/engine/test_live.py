"""What a policy sees and computes: right by brute force, bounded by the scratch, without reading the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringkv import RingConfig
from ringkv.engine.policies import POLICIES
from ringkv.engine.policies.live import Live
from ringkv.engine.ring.evict import evict, observe_due
from ringkv.engine.ring.storage import Ring
from ringkv.kernels.pairs import Pairs
from rings import fill
from tiny import tiny_config

EVICTING = [name for name, cls in POLICIES.items() if cls.evicts]
HEADS, KV_HEADS, D = 4, 2, 8
INV_FREQ = torch.tensor([1.0, 0.3, 0.01, 0.0])
LEAST = 2 * 512  # words of scratch that one row of R-KV's similarities needs


def full_ring(policy: str, device: str = "cpu") -> tuple[Ring, list[tuple[int, int]]]:
    """Three layers of two lanes, all with 512 tokens, a window of 64."""
    model = tiny_config(heads=HEADS, kv_heads=KV_HEADS, head_dim=D)
    ring = Ring(model, RingConfig(448, 64, policy, "all"), 2, torch.device(device), torch.float32)
    pairs = [(layer, lane) for layer in range(3) for lane in range(2)]
    ring.counts[:] = 512
    if device == "cpu":
        noise = torch.Generator().manual_seed(0)
        for i, (layer, lane) in enumerate(pairs):
            q, k, v = (
                torch.randn(*shape, D, generator=noise) for shape in ((HEADS, 64), (KV_HEADS, 512), (KV_HEADS, 512))
            )
            fill(ring, layer, lane, 1.5 * q, k, v, scramble=i)
    return ring, pairs


def evict_all(ring: Ring, pairs: list[tuple[int, int]]) -> None:
    if ring.state:
        observe_due(ring, ring.counts == 512)
    evict(ring, pairs)


@pytest.mark.parametrize("policy", EVICTING)
def test_no_host_synchronisation(policy):
    """On the meta device there are no numbers to read: an .item(), a mask as an index or a branch raises."""
    ring, pairs = full_ring(policy, "meta")
    evict_all(ring, pairs)
    assert (ring.counts == 448).all()


@pytest.mark.parametrize("policy", EVICTING)
def test_scratch_bounds_what_is_materialised(policy):
    """With the least scratch the same victims go, and nothing of n x n is allocated."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known | {scratch}:
                    self.largest = max(self.largest, x.untyped_storage().nbytes())
            return out

    whole, pairs = full_ring(policy)
    evict_all(whole, pairs)
    blocks, pairs = full_ring(policy)
    blocks.scratch = torch.empty(LEAST)
    scratch = blocks.scratch.data_ptr()
    with Watch() as watch:
        evict_all(blocks, pairs)
    assert torch.equal(whole.position, blocks.position)
    tables = len(pairs) * HEADS * 512 * 8  # eight bytes for every query head and live token
    assert 0 < watch.largest <= tables < 512 * 512 * 4


# triattention is not among them: it looks at one query at a time where the scratch is small.
@pytest.mark.parametrize(
    "policy", ["tova", "h2o", "snapkv", "rkv", "gkv", "vase-attnv", "curdkv", "vase-dkv", "expected-attention"]
)
def test_scratch_too_small(policy):
    ring, pairs = full_ring(policy)
    ring.scratch = torch.empty(10)
    with pytest.raises(MemoryError, match="more than the scratch of 40 bytes"):
        evict_all(ring, pairs)


def live_of(q: Tensor, k: Tensor, last: int, window: int = 8, scratch: int = 10_000) -> Live:
    """One pair: q [Hq, w, D] in any order, k [H, n, D] in position order, positions 0 .. n-1."""
    one, n = torch.tensor([0]), k.shape[1]
    positions = torch.arange(n).expand(1, len(k), -1)
    return Live(
        position=positions,
        v_range=positions.float(),
        slot=positions,
        k=k[None, None],
        v=k[None, None],
        queries=q[None, None],
        last=torch.tensor([last]),
        pairs=Pairs([(0, 0)], torch.device("cpu")),
        layer=one,
        inv_freq=INV_FREQ[None],
        seed=one,
        sample=one,
        eviction=one,
        window=window,
        budget=n - 2,
        sinks=0,
        pin=one,
        scratch=torch.empty(scratch),
        state={},
    )


def softmax(logits: list[float]) -> Tensor:
    weights = torch.tensor(logits, dtype=torch.float64).exp()
    return weights / weights.sum()


@pytest.mark.parametrize("present", range(1, 9))
@pytest.mark.parametrize("scratch", [2 * 12, 5 * 12, 10_000])
def test_attention_with_fewer_queries_than_the_window(present, scratch):
    """1 .. W queries: the mean over those that are there, each head and the maximum over its group."""
    noise = torch.Generator().manual_seed(present)
    q = torch.randn(HEADS, present, D, generator=noise, dtype=torch.float64)
    k = torch.randn(KV_HEADS, 20, D, generator=noise, dtype=torch.float64)
    live = live_of(q.float(), k.float(), last=present // 2, scratch=scratch)
    dots = [[[float(q[h, w] @ k[h // 2, i]) / D**0.5 for i in range(12)] for w in range(present)] for h in range(HEADS)]
    rows = torch.stack([torch.stack([softmax(row) for row in head]) for head in dots])  # [Hq, w, c]
    close = {"rtol": 1e-5, "atol": 0, "check_dtype": False}
    torch.testing.assert_close(live.attention()[0], rows.mean(1), **close)
    torch.testing.assert_close(live.attention(last_only=True)[0], rows[:, present // 2], **close)
    pooled = [
        torch.stack(
            [softmax([max(a, b) for a, b in zip(dots[h][w], dots[h + 1][w], strict=True)]) for w in range(present)]
        )
        for h in (0, 2)
    ]
    torch.testing.assert_close(live.attention(group_max=True)[0], torch.stack(pooled).mean(1), **close)


@pytest.mark.parametrize("w, last", [(8, 3), (8, 7), (20, 19)])
@pytest.mark.parametrize("since", [0, 14, 17, 20])
def test_received_attention(w, last, since):
    """The queries at positions 20 - w .. 19 lie in a ring of w places; each sees the keys up to itself."""
    noise = torch.Generator().manual_seed(0)
    q = torch.randn(HEADS, 20, D, generator=noise, dtype=torch.float64)
    k = torch.randn(KV_HEADS, 20, D, generator=noise, dtype=torch.float64)
    place = [(last - (19 - p)) % w for p in range(20 - w, 20)]
    stored = torch.empty(HEADS, w, D)
    stored[:, place] = q[:, 20 - w :].float()
    live = live_of(stored, k.float(), last=last, scratch=3 * 2 * 20)
    want = torch.zeros(KV_HEADS, 20, dtype=torch.float64)
    for h in range(HEADS):
        for p in range(max(since, 20 - w), 20):
            want[h // 2, : p + 1] += softmax([float(q[h, p] @ k[h // 2, i]) / D**0.5 for i in range(p + 1)]) / 2
    assert live.seen.tolist() == [20]
    got = live.received_attention(torch.tensor([since]))[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0, check_dtype=False)


def test_received_attention_of_few_tokens():
    """Three tokens seen and a window of eight: the other places of the query ring count for nothing, NaN or not."""
    noise = torch.Generator().manual_seed(0)
    q, k = torch.randn(HEADS, 8, D, generator=noise), torch.randn(KV_HEADS, 3, D, generator=noise)
    q[:, 3:] = 1e4
    got = live_of(q, k, last=2).received_attention(torch.tensor([0]))
    torch.testing.assert_close(got, live_of(q[:, :3], k, last=2).received_attention(torch.tensor([0])))
    torch.testing.assert_close(got.sum(-1), torch.full((1, KV_HEADS), 3.0))


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5, 0.99])
@pytest.mark.parametrize("scratch", [2 * 20, 14 * 20, 10_000])
def test_redundancy(threshold, scratch):
    noise = torch.Generator().manual_seed(1)
    k = torch.randn(KV_HEADS, 20, D, generator=noise, dtype=torch.float64)
    k[:, 7] = 3 * k[:, 2]
    got = live_of(torch.zeros(HEADS, 1, D), k.float(), last=0, scratch=scratch).redundancy(threshold)[0]
    for head in range(KV_HEADS):
        unit = [row / (row.norm() + 1e-8) for row in k[head]]
        sums = [0.0] * 20
        for i in range(20):
            cosines = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(20)]
            matches = [j for j in range(20) if cosines[j] > threshold]
            cosines[max(matches, default=0)] = 0.0
            sums = [a + b for a, b in zip(sums, cosines, strict=True)]
        torch.testing.assert_close(got[head], torch.tensor(sums) / 20, rtol=1e-5, atol=1e-7)


def test_redundancy_of_a_zero_key():
    """A key of length 0 resembles nothing, and is no NaN."""
    k = torch.ones(1, 10, D)
    k[0, 4] = 0
    got = live_of(torch.zeros(2, 1, D), k, last=0).redundancy(0.5)[0, 0]
    assert got[4] == 0
    assert got.isfinite().all()


@pytest.mark.parametrize("scratch", [D + 3, 5 * (D + 3), 10_000])
def test_leverage(scratch):
    noise = torch.Generator().manual_seed(2)
    k = torch.randn(KV_HEADS, 20, D, generator=noise)
    g = torch.randn(1, D, 3, generator=noise)
    live = live_of(torch.zeros(HEADS, 1, D), k, last=0, scratch=scratch)
    squares = torch.einsum("hnd,dr->hnr", k.double(), g[0].double()).square().sum(-1)
    torch.testing.assert_close(live.leverage(g)[0].double(), squares[:, :12].square(), rtol=1e-5, atol=0)


def test_leverage_counts_the_gathered_rows():
    """A block of tokens holds its rows and their projections: one word less than one token needs is too little."""
    live = live_of(torch.zeros(HEADS, 1, D), torch.ones(KV_HEADS, 20, D), last=0, scratch=D + 2)
    with pytest.raises(MemoryError, match="one token at rank 3"):
        live.leverage(torch.ones(1, D, 3))
