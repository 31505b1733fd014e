"""The compiled attention of a prompt against torch's."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from kernel_checks import assert_as_exact, three_ways
from ringkv.kernels import native, prefill_attention
from ringkv.kernels.backend import use
from ringkv.kernels.blocks import pausing
from ringkv.kernels.table import causal_attention

pytestmark = pytest.mark.usefixtures("compiled")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt(n, heads, kv_heads, d, seed=0):
    """Queries, keys and values as views of one projection."""
    qkv = draw(n, (heads + 2 * kv_heads) * d, seed=seed).view(n, -1, d)
    return qkv.split((heads, kv_heads, kv_heads), 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "n, heads, kv_heads, d",
    [
        (1, 3, 3, 64),
        (3, 4, 2, 16),
        (64, 9, 3, 64),
        (700, 9, 3, 64),
        (130, 8, 1, 80),
        (333, 6, 2, 6),
        (65, 1040, 2, 8),
        (200, 2, 2, 16),
        (150, 7, 1, 20),
    ],
)
def test_causal_attention(n, heads, kv_heads, d):
    """Also where a block of queries is one position, where rows that are worked on together begin on both sides of a
    block of keys (the last two), and with slices of a longer row."""
    scratch = torch.full((1 << 20,), torch.nan)
    q, k, v = prompt(n, heads, kv_heads, d)
    kernel, twin, exact = three_ways(causal_attention, 3 * q, k, v, scratch, path="native")
    assert_as_exact(kernel.flatten()[None], twin.flatten()[None], exact.flatten()[None])
    shorter = (n + 1) // 2
    with use("native"):
        first = causal_attention(3 * q[:shorter], k[:shorter], v[:shorter], scratch)
    assert torch.equal(first, kernel[:shorter]), "what comes later changes no bit"


def test_causal_attention_runs_on_as_many_threads_as_its_scratch_allows():
    before, inputs = torch.get_num_threads(), prompt(300, 6, 2, 16)
    size = native.library().causal_scratch(3, 16)
    torch.set_num_threads(3)
    results = [native.causal_attention(*inputs, torch.empty(size * fits + 5)) for fits in (1, 2, 3)]
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("threads")
def test_the_blocks_of_a_long_prompt_change_no_bit(cpu_path, monkeypatch):
    """On both paths; between them a caller may stop it."""
    inputs, scratch, calls = prompt(3000, 6, 3, 16), torch.empty(1 << 20), []
    with use(cpu_path):
        with pausing(lambda: calls.append("of a short one")):
            whole = causal_attention(*inputs, scratch)
        assert calls == []
        monkeypatch.setattr(native, "AT_ONCE", 1)
        monkeypatch.setattr(prefill_attention, "LONG", 1)
        with pausing(lambda: calls.append("between")):
            assert torch.equal(causal_attention(*inputs, scratch), whole)
        assert len(calls) >= 2
        with pytest.raises(ZeroDivisionError), pausing(lambda: 1 / 0):
            causal_attention(*inputs, scratch)
        assert torch.equal(causal_attention(*inputs, scratch), whole), "nobody asks any more"


def guarded(x):
    """A copy behind which nothing can be read or written: the process would end."""
    size = x.numel() * x.itemsize
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=end - size)
    return copy.copy_(x.flatten()).view(x.shape)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("n, heads, kv_heads, d", [(1, 1, 1, 2), (70, 7, 1, 20), (129, 8, 2, 64)])
def test_causal_attention_stays_within_its_arrays(n, heads, kv_heads, d):
    """Blocks and strips are padded; what they are padded with is not read from behind the inputs."""
    inputs = [draw(n, each, d, seed=each) for each in (heads, kv_heads, kv_heads)]
    size = torch.get_num_threads() * native.library().causal_scratch(heads // kv_heads, d)
    expected = native.causal_attention(*inputs, torch.empty(size))
    assert torch.equal(native.causal_attention(*map(guarded, (*inputs, torch.full((size,), torch.nan)))), expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_in_a_prompt_shows_from_there_on(which):
    inputs = prompt(100, 3, 1, 64)
    inputs[which][70] = torch.nan
    out = native.causal_attention(*inputs, torch.empty(1 << 18))
    assert out[70].isnan().all()
    assert out[99].isnan().all() or which == 0
    assert out[:64].isfinite().all()


def test_a_prompts_later_values_weigh_nothing_however_large():
    inputs = prompt(100, 3, 1, 64)
    before = native.causal_attention(*inputs, torch.empty(1 << 18))
    inputs[2][70] = 3e38
    assert torch.equal(native.causal_attention(*inputs, torch.empty(1 << 18))[:70], before[:70])


def test_a_prompts_products_may_overflow_below():
    """A whole block of keys of no weight, and the first of the next."""
    q, k, v = torch.full((100, 1, 16), 1e20), torch.full((100, 1, 16), -1e20), draw(100, 1, 16)
    k[70:] = 0
    out = native.causal_attention(q, k, v, torch.empty(1 << 18))
    means = v[70:, 0].double().cumsum(0) / torch.arange(1, 31)[:, None]
    assert torch.allclose(out[70:].double(), means, rtol=0, atol=1e-6)


def test_a_row_that_does_not_lie_in_one_piece_is_refused():
    with pytest.raises(AssertionError):
        native.causal_attention(*(torch.zeros(4, 1, 16)[..., ::2],) * 3, torch.empty(1 << 18))
