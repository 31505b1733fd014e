"""Philox against Random123's published answers, and against Python integers."""

from __future__ import annotations

import pytest
import torch

import naive
from ringkv.kernels.backend import use
from ringkv.kernels.philox import gumbel, to_uniform
from ringkv.kernels.table import philox

KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


@pytest.mark.parametrize("key, counter, answer", KNOWN)
def test_known_answers(key, counter, answer, cpu_path):
    seed = key[0] | key[1] << 32
    with use(cpu_path):
        assert tuple(int(word) for word in philox(torch.tensor(signed(seed)), *counter)) == answer
    assert tuple(naive.philox(seed, counter)) == answer


def test_words_of_a_batch_equal_python(cpu_path):
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    counters = torch.randint(0, 2**32, (4, 50), generator=generator)
    with use(cpu_path):
        got = torch.stack(philox(seed, *counters))
    for i in range(50):
        want = naive.philox(int(seed[i]) % 2**64, tuple(counters[:, i].tolist()))
        assert got[:, i].tolist() == want


def test_uniform_is_inside_and_centred():
    edges = to_uniform(torch.tensor([0, 2**32 - 1]))
    assert edges.tolist() == [2.0**-24, 1 - 2.0**-24]
    words = philox(torch.tensor(3), torch.arange(100_000), 0, 0, 0)[0]
    u = to_uniform(words).double()
    # The mean of 100,000 uniforms has a standard deviation of 0.29 / 316.
    assert abs(float(u.mean()) - 0.5) < 4.5 * 12**-0.5 / 100_000**0.5
    assert gumbel(edges).isfinite().all()


@pytest.mark.usefixtures("compiled")
def test_compiled_noise_is_the_twins(threads):
    """Counters that broadcast, strided ones and plain ints among them; enough of them for threads to share."""
    seed = torch.tensor([7, -1, 2**62])[:, None, None]
    position = torch.arange(2 * 5000).view(1, 5000, 2)[..., 0].unsqueeze(1)
    head, tag = torch.arange(3)[None, :, None] + 65536, torch.tensor([[[1]], [[257]], [[513]]])
    ways = []
    for path in ("torch", "native"):
        with use(path):
            ways.append(torch.stack(philox(seed, position, head, 4, tag)))
    assert ways[0].shape == (4, 3, 3, 5000)
    assert torch.equal(*ways)
