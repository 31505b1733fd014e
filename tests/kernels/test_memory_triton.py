"""What launchers do on the host: on the meta device, where kernels do nothing, what they allocate and wait for."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kernel_checks import NoReads
from ringkv.engine.config import RingConfig
from ringkv.engine.live_bytes import LiveBytes
from ringkv.engine.memory import Planner
from ringkv.engine.policies import POLICIES
from ringkv.engine.ring.evict import evict, evict_due, groups
from ringkv.engine.ring.storage import SCRATCH_BYTES, Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import use
from ringkv.models.decoder import Decoder
from tiny import tiny_config

META = torch.device("meta")


@pytest.fixture(autouse=True)
def kernels_do_nothing(monkeypatch):
    monkeypatch.setattr(InterpretedFunction, "run", lambda *args, **options: None)


def shape(group, layers=2, **changes):
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64} | changes
    return tiny_config(heads=2 * group, kv_heads=2, layers=layers, **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 600, "intermediate_size": 60000}], ids=["tokens", "layer"])
def test_a_step_lives_in_the_pool_that_is_planned(lanes, dtype, changes):
    config = shape(4, **changes)
    sampler, steering = Sampler(lanes, config.vocab_size, META, static=True), Steering(lanes, (1, 2), META)
    ring = Ring(config, RingConfig(256, 32), lanes, META, dtype)
    runner = Runner(Decoder(config, META, dtype), ring, sampler, steering)
    with use("triton"), torch.inference_mode(), LiveBytes() as live:
        runner.device_step()
    planned = Planner(config, dtype, captured=True).step_bytes(lanes) - sampler.nbytes - steering.nbytes
    assert live.peak <= planned * 1.01
    assert planned <= 1.1 * live.peak


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.evicts])
def test_a_group_of_evictions_lives_within_the_size_of_the_scratch(policy, group):
    ring = Ring(shape(group, layers=28), RingConfig(4096, 64, policy), 8, META, torch.bfloat16)
    ring.counts[:] = ring.config.capacity
    with use("triton"), torch.inference_mode():
        parts = list(groups(ring, ring.counts == ring.config.capacity))
        assert len(parts) > 1
        with LiveBytes() as live:
            evict(ring, parts[0])
    assert live.peak <= SCRATCH_BYTES


@pytest.mark.parametrize(
    "policy", ["vase-attnv", "vase-dkv", "rkv", "h2o", "tova", "gkv", "expected-attention", "triattention"]
)
def test_a_step_and_its_evictions_wait_for_nothing(policy):
    config = shape(4)
    ring = Ring(config, RingConfig(256, 32, policy), 4, META, torch.bfloat16)
    sampler, steering = Sampler(4, config.vocab_size, META, static=True), Steering(4, (1, 2), META)
    runner = Runner(Decoder(config, META, torch.bfloat16), ring, sampler, steering)
    for lane in range(4):
        ring.start(lane, 5)
    ring.counts[:] = ring.config.capacity - 1
    with use("triton"), torch.inference_mode(), NoReads():
        runner.device_step()
        ring.follow()
        evict_due(ring)
    assert (ring.evicted == 1).all()
