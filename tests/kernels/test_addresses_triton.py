"""Rings beyond 2^31 elements: buffers of 3 * 2^30 elements that are only committed where they are touched."""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch
from triton.runtime.interpreter import interpreter_builder

from kernel_checks import assert_as_exact, layer
from ringkv.kernels.append_triton import append
from ringkv.kernels.attention_triton import decode_attention
from ringkv.kernels.backend import use
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.rotate import Angles
from ringkv.kernels.select_triton import _lowest
from ringkv.kernels.table import free, lowest, window_attention

HEADS, D, FAR = 3, 64, 2  # the last head begins at 2/3 of 3 * 2^30, so at 2^31
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
CPU = torch.device("cpu")


def lazily(shape, dtype):
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def vectors(slots):
    """float16 [1, 3, slots, D]."""
    return lazily((1, HEADS, slots, D), torch.float16)


def words(slots, dtype=torch.int32):
    return lazily((1, HEADS, slots), dtype)


def grown(ring, slots, window):
    """A small layer moved into a huge one: the same slots of the same heads, the tables far behind."""
    small = ring.k.shape[2]
    huge = replace(
        ring,
        k=vectors(slots),
        v=vectors(slots),
        position=words(slots),
        order=words(slots),
        v_range=words(slots, torch.float32),
        queries=vectors(window),
    )
    for name in ("k", "v", "position", "order", "v_range"):
        getattr(huge, name)[:, :, :small] = getattr(ring, name)
    return huge


def test_sizes():
    assert vectors(1 << 24).numel() == words(1 << 30).numel() == 3 * 2**30
    assert FAR * (1 << 24) * D == FAR * (1 << 30) == 2**31


def test_append_and_attention_with_keys_and_queries_beyond():
    small = replace(layer(1, HEADS, 1, 63, D, 5, torch.float16), evictions=torch.zeros(1, dtype=torch.int32))
    count = int(small.count)
    last = (1 << 24) - 1
    huge = grown(small, 1 << 24, 1 << 24)
    huge.order[..., count] = last
    huge = replace(huge, seen=torch.tensor([last]))
    qkv = torch.randn(1, 3 * HEADS * D, generator=torch.Generator().manual_seed(0)).half()
    still = torch.ones(1, D // 2), torch.zeros(1, D // 2)
    with use("triton"):
        q = append(qkv, None, 1e-6, Angles(*still), huge)
        seen = decode_attention(q, huge)
    heads = qkv.view(3, HEADS, D)
    assert torch.equal(q[0], heads[0])
    assert torch.equal(huge.queries[0, :, last], heads[0])
    assert torch.equal(huge.k[0, :, last], heads[1])
    assert torch.equal(huge.v[0, :, last], heads[2])
    assert (huge.position[0, :, last] == last).all()
    # Attention over the slots that such a lane may look at, which end long before the last.
    rows = []
    for head in range(HEADS):
        visible = small.position[0, head, : count + 1] >= 0
        k, v = (x[0, head, : count + 1][visible].double() for x in (small.k, small.v))
        rows.append((q[0, head].double() @ k.T / D**0.5).softmax(-1) @ v)
    exact = torch.stack(rows)
    assert_as_exact(seen[0], exact.half(), exact)


def test_append_with_tables_beyond():
    """Marks, order and ranges of 3 * 2^30 elements each; keys and values are then far larger still."""
    small = layer(1, HEADS, 1, 63, D, 5, torch.float16)
    slots = 1 << 30
    huge = grown(small, slots, 5)
    huge.order[..., int(small.count)] = slots - 1
    qkv = torch.randn(1, 3 * HEADS * D, generator=torch.Generator().manual_seed(0)).half()
    with use("triton"):
        append(qkv, None, 1e-6, Angles(torch.ones(1, D // 2), torch.zeros(1, D // 2)), huge)
    heads = qkv.view(3, HEADS, D)
    assert torch.equal(huge.k[0, :, -1], heads[1])
    assert torch.equal(huge.v[0, :, -1], heads[2])
    assert (huge.position[0, :, -1] == int(small.seen)).all()
    assert torch.equal(huge.v_range[0, :, -1], heads[2].float().amax(-1) - heads[2].float().amin(-1))


def test_selection_with_tables_beyond():
    slots, n, victims = 1 << 30, 40, 7
    order, position = words(slots)[None], words(slots)[None]
    slot = slots - 1 - torch.arange(n).repeat(1, HEADS, 1)
    order[0, ..., :n] = slot.int()
    position[0].scatter_(2, slot, 5)
    count, evictions = torch.full((1, 1), n, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    victim = torch.zeros(1, HEADS, n - victims, dtype=torch.bool)
    for head in range(HEADS):
        victim[0, head, head : head + victims] = True
    with use("triton"):
        freed = free(victim, slot, victims, Pairs([(0, 0)], CPU), order, position, count, evictions)
    for head in range(HEADS):
        ranks = [*range(head), *range(head + victims, n), *range(head, head + victims)]
        assert torch.equal(order[0, 0, head, :n].long(), slot[0, head, ranks])
        assert torch.equal(freed[0, head], slot[0, head, head : head + victims])
        assert (position[0, 0, head, freed[0, head]] == -1).all()
        assert (position[0, 0, head, slot[0, head]] == 5).sum() == n - victims
    assert (int(count), int(evictions)) == (n - victims, 1)


def test_victims_of_the_last_row(monkeypatch):
    """A row is a program: the last one runs alone, since the interpreter would walk through all of them."""
    width, count = 512, 70
    last = 3 * 2**30 // width - 1
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: vars(interpreter_builder).update(at))
    at = {"grid_idx": (last, 0, 0)}
    priority, protected, victim = (
        lazily((last + 1, width), dtype) for dtype in (torch.float32, torch.bool, torch.bool)
    )
    generator = torch.Generator().manual_seed(0)
    priority[last] = torch.randn(width, generator=generator)
    protected[last] = torch.rand(width, generator=generator) < 0.4
    _lowest[(1,)](priority, protected, priority, victim, width, count, False, 128)
    assert torch.equal(victim[last], lowest(priority[last], protected[last], count))
    assert victim[last].sum() == count


def test_window_scores_with_keys_beyond():
    generator = torch.Generator().manual_seed(0)
    slots, n, w = 1 << 24, 50, 5
    k = vectors(slots)[None]
    slot = slots - 1 - torch.arange(n).repeat(1, HEADS, 1)
    keys = torch.randn(HEADS, n, D, generator=generator).half()
    k[0, 0, torch.arange(HEADS)[:, None], slot[0]] = keys
    queries = torch.randn(1, 1, HEADS, w, D, generator=generator).half()
    args = queries, k, slot, Pairs([(0, 0)], CPU), torch.empty(4096)
    with use("triton"):
        kernel = window_attention(*args)
    exact = (queries[0, 0].double() @ keys.double().transpose(1, 2) / D**0.5).softmax(-1).mean(1)[None]
    assert_as_exact(kernel, window_attention(*args), exact)
