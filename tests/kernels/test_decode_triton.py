"""A whole decode through interpreted kernels: the tokens and the live sets of the torch path."""

from __future__ import annotations

import pytest
import torch

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.engine.ring.integrity import check_integrity
from ringkv.kernels.backend import use
from tiny import tiny_config, tiny_decoder, tiny_weights


def decode(policy, backend, steps, **params):
    """Three requests on two lanes: what they gave, and the engine afterwards."""
    config = tiny_config("qwen3", layers=2)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    engine = Engine(decoder, ring=RingConfig(20, 6, policy, "all"), lanes=2, backend=backend)
    prompts = [list(range(1, 40)), [7], [3, 1, 4, 1, 5]]
    lengths = (steps, steps // 3, steps // 2)
    settings = [SamplingParams(max_tokens=length, seed=i, **params) for i, length in enumerate(lengths)]
    done = engine.generate(prompts, settings)
    return [(each.token_ids, each.finish_reason, each.ring["evictions_per_layer"]) for each in done], engine


GREEDY = ("vase-dkv", "rkv", "h2o", "tova", "gkv", "expected-attention", "triattention")
SAMPLED = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(
    "policy, steps, params",
    [("vase-attnv", 50, SAMPLED), *((policy, 20, {"temperature": 0}) for policy in GREEDY)],
)
def test_tokens_and_live_sets(policy, steps, params):
    kernels, engine = decode(policy, "triton", steps, **params)
    assert engine.backend == "triton"
    twins, reference = decode(policy, "torch", steps, **params)
    assert kernels == twins
    assert min(kernels[0][2]) >= steps // 7
    ring, other = engine.ring, reference.ring
    for name in ("position", "order", "count", "evictions", "seen"):
        assert torch.equal(getattr(ring, name), getattr(other, name)), name
    # What an invisible slot holds is not compared: both paths write the same slots, so here all of it agrees.
    for name in ("k", "v", "v_range", "queries"):
        assert torch.allclose(getattr(ring, name), getattr(other, name), rtol=1e-4, atol=1e-5), name


def test_an_idle_lane_is_not_touched():
    config = tiny_config(layers=1)
    engine = Engine(
        tiny_decoder(config, tiny_weights(config, torch.float32)), ring=RingConfig(20, 6), lanes=3, backend="triton"
    )
    ring, runner = engine.ring, engine._runner
    for tensor in (ring.k, ring.v, ring.v_range, ring.queries):
        tensor[:, 1] = torch.nan
    before = {name: tensor.clone() for name, tensor in ring.tensors().items()}
    with use("triton"):
        for lane in (0, 2):
            ring.reset(lane, seed=lane)
            runner.first(lane, runner.prefill(lane, [1, 2, 3]))
        for _ in range(30):
            drawn = runner.step()
            check_integrity(ring)
    assert drawn.tokens[1] == -1
    assert min(drawn.tokens[0], drawn.tokens[2]) >= 0
    for name in ("k", "v", "position", "order", "v_range", "queries", "count", "evictions"):
        own, now = before[name][:, 1], ring.tensors()[name][:, 1]
        assert torch.equal(own.nan_to_num(7), now.nan_to_num(7)), name


def test_a_snapshot_goes_on_in_another_lane():
    """Oracle: the uninterrupted run through the same kernels, its ids and tables."""
    config = tiny_config("qwen3", layers=1)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    engine = Engine(decoder, ring=RingConfig(20, 6, "h2o", "all"), lanes=2, backend="triton")
    params = SamplingParams(max_tokens=14, seed=1, on_repetition="ignore", **SAMPLED)
    *_, last = events = list(engine.stream(list(range(1, 40)), params, every=5, keep=True))
    (snapshot,) = (each.snapshot for each in events if each.snapshot is not None and len(each.snapshot.tokens) == 5)
    neighbour = engine.stream([7], params)
    next(neighbour)
    *_, done = engine.resume(snapshot, keep=True)
    neighbour.close()
    assert done.completion.token_ids == last.completion.token_ids
    for name, table in last.completion.snapshot.lane.items():
        assert torch.equal(done.completion.snapshot.lane[name], table), name
