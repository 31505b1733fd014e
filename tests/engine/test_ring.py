"""The ring's invariants, step by step, and what an invisible slot may hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv.engine.config import RingConfig
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.observer import RingObserver
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import use
from ringkv.kernels.rotate import Angles
from ringkv.kernels.table import attend
from rings import fill, make_ring, positions
from tiny import tiny_config, tiny_decoder, tiny_weights

CPU = torch.device("cpu")
STEPS = 125  # of each of 40 examples: 5,000 in all


def build(config, ring_config, lanes=2, dtype=torch.float32):
    decoder = tiny_decoder(config, tiny_weights(config, dtype))
    ring = Ring(config, ring_config, lanes, CPU, dtype)
    return Runner(decoder, ring, Sampler(lanes, config.vocab_size, CPU), Steering(lanes, None, CPU))


def poison(ring: Ring, value: float) -> None:
    """Fill every invisible slot with what would show."""
    hidden = ring.position < 0
    for tensor in (ring.k, ring.v):
        tensor[hidden] = value
    ring.v_range[hidden] = 1e4


@st.composite
def rings(draw):
    window = draw(st.integers(1, 12))
    sinks = draw(st.integers(0, 5))
    budget = draw(st.integers(window + sinks + 1, window + sinks + 30))
    policy = draw(st.sampled_from(["streaming", "vase-attnv", "vase-attnv:large=3,kernel=1"]))
    retention = draw(st.sampled_from(["all", "refreekv:threshold=0.2"]))
    return RingConfig(budget, window, policy, retention, sinks)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("path, unseen", [("native", torch.nan), ("torch", 1e4)])  # the torch path asks for finite
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    ring_config=rings(),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    prompts=st.lists(st.integers(1, 90), min_size=2, max_size=2),
    late=st.integers(0, 40),
)
def test_invariants_hold_after_each_step(path, unseen, ring_config, heads, prompts, late):
    with use(path):
        check_invariants(unseen, ring_config, heads, prompts, late)


def check_invariants(unseen, ring_config, heads, prompts, late):
    config = tiny_config(heads=heads[0], kv_heads=heads[1])
    clean, poisoned = build(config, ring_config), build(config, ring_config)
    bytes_at_start = clean.ring.nbytes
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(97, (n,), generator=generator).tolist() for n in prompts]

    def begin(lane: int) -> None:
        for runner in (clean, poisoned):
            poison(poisoned.ring, unseen)
            runner.ring.reset(lane, seed=lane)
            runner.first(lane, runner.prefill(lane, ids[lane]))

    begin(0)
    for step in range(STEPS):
        if step == late:
            begin(1)
        poison(poisoned.ring, unseen)
        assert clean.step() == poisoned.step()
        check_integrity(clean.ring)
        check_integrity(poisoned.ring)
    assert torch.equal(clean.ring.position, poisoned.ring.position)
    assert clean.ring.nbytes == bytes_at_start
    assert clean.ring.counts.max() < ring_config.capacity


@pytest.mark.parametrize(
    "breaking, message",
    [
        (lambda ring: ring.order[0, 0, 0].fill_(0), "permutation"),
        (lambda ring: ring.count[0, 0].add_(1), "counts differ"),
        (lambda ring: ring.position[1, 0, 0].fill_(-1), "a live slot is marked free"),
        (lambda ring: ring.position[1, 0, 0].fill_(7), "is marked live"),
        (lambda ring: ring.order[0, 0, 0, :2].copy_(ring.order[0, 0, 0, :2].flip(0)), "do not ascend"),
        (lambda ring: ring.position[0, 0, 0, 0].fill_(-1), "a live slot is marked free"),
        (lambda ring: ring.seen[0].sub_(1), "in the future"),
        (lambda ring: ring.seen[0].add_(1), "window token is gone"),
        (lambda ring: ring.pin[0].fill_(15), "sink or pinned"),
        (lambda ring: ring.evictions[0, 0].add_(1), "evictions differ"),
    ],
)
def test_integrity_sees_what_is_broken(breaking, message):
    runner = build(tiny_config(), RingConfig(24, 4, "streaming", "all"), lanes=1)
    runner.ring.reset(0, seed=0)
    runner.first(0, runner.prefill(0, list(range(40))))
    check_integrity(runner.ring)
    breaking(runner.ring)
    with pytest.raises(AssertionError, match=message):
        check_integrity(runner.ring)


def test_an_idle_lane_is_never_written(cpu_path):
    with use(cpu_path):
        check_idle_lane()


def check_idle_lane():
    runner = build(tiny_config(), RingConfig(24, 4, "vase-attnv", "all"), lanes=2)
    ring = runner.ring
    for lane in (0, 1):
        ring.reset(lane, seed=0)
        runner.first(lane, runner.prefill(lane, [1, 2, 3, 4, 5]))
    for _ in range(40):
        runner.step()
    ring.stop(1)
    axis = {name: 1 if tensor.dim() > 1 else 0 for name, tensor in ring.tensors().items()}
    before = {
        name: tensor.select(axis[name], 1).clone() for name, tensor in ring.tensors().items() if name != "next_token"
    }
    for _ in range(10_000):
        tokens = runner.step().tokens
        assert tokens[0] >= 0
        assert tokens[1] == -1
    for name, was in before.items():
        assert torch.equal(ring.tensors()[name].select(axis[name], 1), was), name
    ring.reset(1, seed=0)
    runner.first(1, runner.prefill(1, [1, 2, 3, 4, 5]))
    check_integrity(ring)
    assert ring.counts[:, 1].tolist() == [5] * 3


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_an_idle_lane_attends_to_nothing(kv_heads, cpu_path):
    ring = make_ring("streaming", budget=16, window=4, kv_heads=kv_heads, lanes=2)
    q, k, v = torch.randn(2, 4, 4), torch.randn(kv_heads, 9, 4), torch.randn(kv_heads, 9, 4)
    for lane in (0, 1):
        fill(ring, 0, lane, q, k, v)
    ring.start(0, 9)
    still = Angles(torch.ones(2, 2), torch.zeros(2, 2))
    with use(cpu_path):
        out = attend(torch.randn(2, (2 + 2 * kv_heads) * 4), None, 1e-6, still, ring.views[0])
    assert out[0].all()
    assert not out[1].any()


def test_bytes_are_the_formula():
    config = tiny_config(heads=6, kv_heads=2, layers=3)
    ring = Ring(config, RingConfig(50, 10), 3, CPU, torch.float16)
    slots = 3 * 3 * 2 * 60
    tables = slots * (4 + 4 + 4) + 3 * 3 * 6 * 10 * 16 * 2 + 2 * 3 * 3 * 4 + 3 * (5 * 8 + 4 + 1)
    assert ring.nbytes == 2 * slots * 16 * 2 + tables


class Account(RingObserver):
    """Live positions of each (layer, lane), by head, from what the ring tells alone."""

    def __init__(self):
        self.live, self.told = {}, []

    def reset(self, lane):
        self.told.append(("reset", lane))
        self.live = {pair: heads for pair, heads in self.live.items() if pair[1] != lane}

    def admitted(self, layer, lane, retained, live, v_range):
        assert set(live.flatten().tolist()) <= set(retained.tolist())
        assert v_range.shape == (len(live), 90)
        self.live[layer, lane] = [set(head) for head in live.tolist()]

    def evicted(self, pairs, live, victim):
        for row, pair in enumerate(pairs):
            for head, kept in enumerate(self.live[pair]):
                before = live.position[row, head]
                kept |= set(before.tolist())  # the tokens of the steps since then
                kept -= set(before[: live.candidates][victim[row, head]].tolist())

    def copied(self, source, target):
        self.told.append(("copied", source, target))
        self.live |= {
            (layer, target): list(map(set, heads)) for (layer, lane), heads in self.live.items() if lane == source
        }


def test_an_observer_hears_of_all_that_enters_and_leaves():
    """Read right after evictions, its account is what the ring holds."""
    runner = build(tiny_config(), RingConfig(24, 4, "vase-attnv", "refreekv:threshold=0.3"))
    ring, account = runner.ring, Account()
    ring.observers.append(account)
    ids = torch.randint(97, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    ring.reset(0, seed=3)
    runner.first(0, runner.prefill(0, ids))
    ring.copy_lane(0, 1, sample=1)
    runner.first(1, torch.zeros(1, 97))
    checked = 0
    for _ in range(60):
        before = ring.evicted.copy()
        runner.step()
        for layer, lane in zip(*(ring.evicted > before).nonzero(), strict=True):
            held = [set(head) for head in positions(ring, layer, lane)]
            assert account.live[layer, lane] == held
            checked += 1
    assert checked >= 60
    ring.reset(1, seed=4)
    assert account.told == [("reset", 0), ("copied", 0, 1), ("reset", 1)]
    assert {lane for _, lane in account.live} == {0}
