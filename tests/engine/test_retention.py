"""ReFreeKV against the papers' own numbers, and brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ringkv import ReFreeKV
from ringkv.engine.retention import last_attention

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "refreekv.safetensors")


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("threshold", [0.001, 0.01, 0.05])
def test_golden_prefix_lengths(case, threshold):
    attention = GOLDEN[f"case{case}.attn"]
    length = int(GOLDEN[f"case{case}.keep@{threshold}"])
    retention = ReFreeKV(threshold=threshold)
    assert retention.prefix(attention) == length
    n = attention.shape[1]
    ranking = [*range(min(4, n)), *range(n - 1, 3, -1)]
    kept = retention.keep(2, n, lambda: attention)
    assert set(kept.nonzero()[:, 0].tolist()) == set(ranking[:length])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 30),
    first=st.integers(0, 6),
    threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]),
    seed=st.integers(0, 99),
)
def test_prefix_by_brute_force(n, first, threshold, seed):
    attention = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(-1)
    ranking = [*range(min(first, n)), *range(n - 1, min(first, n) - 1, -1)]
    norm = [float(attention[:, ranking[:i]].double().norm(dim=1).mean()) for i in range(n + 1)]
    short = [(norm[n] - norm[i]) / norm[n] for i in range(n + 1)]
    got = ReFreeKV(threshold=threshold, first=first).prefix(attention)
    assert 1 <= got <= n
    assert short[got] <= threshold + 1e-12
    assert got == 1 or short[got - 1] > threshold - 1e-12


def test_the_first_layers_keep_everything_and_look_at_nothing():
    def never():
        raise AssertionError("attention was computed for nothing")

    assert ReFreeKV().keep(0, 100, never) is None
    assert ReFreeKV().keep(1, 100, never) is None
    with pytest.raises(AssertionError, match="for nothing"):
        ReFreeKV().keep(2, 100, never)
    with pytest.raises(AssertionError, match="for nothing"):
        ReFreeKV(whole_layers=0).keep(0, 100, never)


def test_last_attention_is_softmax_of_scaled_products():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(6, 8, generator=generator), torch.randn(11, 2, 8, generator=generator)
    got = last_attention(q, k)
    for head in range(6):
        want = (k[:, head // 3].double() @ q[head].double() / 8**0.5).softmax(-1)
        assert torch.allclose(got[head].double(), want, rtol=0, atol=1e-6)
