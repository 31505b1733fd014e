"""The parts of ``gpu.py``: models with random weights, rings of any age, and inputs for every operation."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringkv.apps.measure.bench import Clock
from ringkv.apps.measure.peer import peer_times
from ringkv.engine.config import RingConfig, SamplingParams
from ringkv.engine.graph import GraphRunner, capture
from ringkv.engine.ring.evict import evict_due, live_tokens
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.engine.sampling.values import Sampling
from ringkv.kernels.append import value_range
from ringkv.kernels.backend import use
from ringkv.kernels.rotate import Angles
from ringkv.kernels.sample import Filters
from ringkv.kernels.table import add_rms_norm, attend, commit, free, lowest, penalize, philox, sample, silu_mul, steer
from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder

Case = Callable[[], Tensor]


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, tied: bool
) -> ModelConfig:
    sizes = (vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim)
    return ModelConfig("qwen3", *sizes, 1e-6, RopeConfig(theta=1e6), 40960, tie_embeddings=tied, qk_norm=True)


QWEN3 = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, 128, 151936, False),
}
SAMPLED = Sampling.resolve(SamplingParams(temperature=0.6, top_k=20, top_p=0.95), {})
TINY = {
    "tiny": _qwen3(32, 48, 2, 4, 2, 16, 97, True),
    "tiny, untied": _qwen3(32, 48, 2, 4, 4, 16, 97, False),
    "tiny, wide": _qwen3(64, 80, 2, 6, 2, 32, 97, False),
}


@dataclass(frozen=True)
class Setting:
    """What is measured: the models and sizes of a run on a GPU, or of a dry run."""

    dry: bool
    device: torch.device
    backend: str
    models: dict[str, ModelConfig]
    dtypes: tuple[torch.dtype, ...]
    budgets: tuple[int, ...]
    lanes: tuple[int, ...]
    warm: int
    timed: int
    aged: int  # evictions before a ring counts as evicted
    long: int  # steps of the long run
    prompt: int
    plan_prompt: int  # tokens of the prompt whose prefill the plan counts
    window: int

    def ring(self, budget: int, policy: str = "vase-attnv") -> RingConfig:
        """The configuration of a ring with this window."""
        return RingConfig(budget, self.window, policy)


WET = Setting(
    False, torch.device("cuda"), "triton", QWEN3, (torch.bfloat16, torch.float32), (4096, 16384), (1, 16),
    warm=20, timed=50, aged=20, long=10_000, prompt=32_768, plan_prompt=4096, window=64,
)  # fmt: skip
DRY = Setting(
    True, torch.device("cpu"), "torch", TINY, (torch.bfloat16, torch.float32), (24, 40), (1, 2),
    warm=1, timed=3, aged=2, long=12, prompt=70, plan_prompt=30, window=8,
)  # fmt: skip


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder with random weights, scaled so that activations stay near 1."""
    decoder = Decoder(config, device, dtype)
    torch.manual_seed(0)
    for name, view in decoder.destinations().items():
        if name.endswith("norm.weight"):
            view.fill_(1)
        else:
            view.normal_(0, view.shape[-1] ** -0.5)
    return decoder


def make(decoder: Decoder, config: RingConfig, lanes: int, setting: Setting, captured: bool = True) -> Runner:
    """A runner with a ring of its own, captured or eager; without a GPU, an eager step takes the place of the graph."""
    gc.collect()  # frees what was measured before
    with use(setting.backend):
        ring = Ring(decoder.config, config, lanes, decoder.device, decoder.dtype)
        sampler = Sampler(lanes, decoder.config.vocab_size, decoder.device, static=True)
        steering = Steering(lanes, None, decoder.device)
        if captured:
            return GraphRunner(decoder, ring, sampler, steering, (lambda step: step) if setting.dry else capture)
        return Runner(decoder, ring, sampler, steering)


def age(runner: Runner, evictions: int, backend: str, clock: Clock | None = None, staggered: bool = False) -> Runner:
    """Start every lane with one token, or bring all lanes to where so many more evictions have happened.

    The keys and values of an aged ring are random.

    Args:
        runner: the runner whose ring ages; it is returned.
        evictions: how many more evictions; 0 starts the lanes afresh.
        backend: the path that computes.
        clock: is marked before and after each eviction of all layers and lanes.
        staggered: evict lane by lane, as where the lanes fill at different steps.
    """
    ring, window = runner.ring, runner.ring.config.window
    with use(backend), torch.inference_mode():
        if not evictions or not ring.running:
            for lane in range(ring.lanes):
                ring.reset(lane, seed=lane)
                runner.sampler.set(lane, SAMPLED)
                runner.prefill(lane, [lane + 1])
        if not evictions:
            return runner
        if not ring.evicted.any():
            for tensor in (ring.k, ring.v, ring.queries):
                tensor.normal_()
            for own, v in zip(ring.v_range, ring.v, strict=True):  # the whole ring in float32 would not fit
                own.copy_(value_range(v))
        for _ in range(evictions):
            count = int(ring.counts.max())
            new = torch.arange(ring.config.capacity - count, device=ring.k.device, dtype=torch.int32)
            marks = (new + ring.seen[:, None].int())[None, :, None].expand(*ring.order.shape[:3], -1)
            ring.position.scatter_(3, ring.order[..., count:].long(), marks)
            ring.count.fill_(ring.config.capacity)
            ring.seen += len(new)
            ring.counts[:], ring.unobserved[:], ring.spans[:] = ring.config.capacity - 1, 0, ring.config.capacity
            if clock is not None:
                clock.mark()
            for lanes in [[lane] for lane in range(ring.lanes)] if staggered else [list(range(ring.lanes))]:
                ring.counts[:, lanes], ring.unobserved[:, lanes] = ring.config.capacity, min(window, count)
                evict_due(ring)
            if clock is not None:
                clock.mark()
    return runner


def kernel_cases(config: ModelConfig, setting: Setting, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Every operation on inputs of the model's shape; operations that write in place get copies."""
    device, lanes = setting.device, max(setting.lanes)
    one = build(replace(config, layers=1), device, dtype)
    runner = make(one, setting.ring(setting.budgets[0]), lanes, setting, captured=False)
    ring = age(runner, 2, setting.backend).ring

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(of)

    hidden, layer = config.hidden_size, one.layers[0]
    x, delta = normal(lanes, hidden), normal(lanes, hidden)
    yield "add_rms_norm", lambda: add_rms_norm(x.clone(), delta, layer.input_norm, 1e-6)
    gate_up = normal(lanes, 2 * config.intermediate_size)
    yield "silu_mul", lambda: silu_mul(gate_up)

    qkv = normal(lanes, (config.heads + 2 * config.kv_heads) * config.head_dim)
    angles = Angles(*one.rope.cos_sin(ring.seen))

    def attended() -> Tensor:
        out = attend(qkv, layer.qk_norms, 1e-6, angles, ring.views[0])
        return torch.cat([x.view(-1, config.head_dim) for x in (out, ring.k, ring.v, ring.queries)])

    yield "attend", attended

    pairs = [(0, lane) for lane in range(min(lanes, 4))]
    live = live_tokens(ring, pairs)
    projection = normal(len(pairs), config.head_dim, 20, of=torch.float32) * 20**-0.5
    since = live.seen - live.window
    yield "window_attention", lambda: live.attention()
    yield "window_attention, last query", lambda: live.attention(last_only=True)
    yield "window_attention, largest head", lambda: live.attention(group_max=True)
    yield "received_attention", lambda: live.received_attention(since)
    yield "leverage", lambda: live.leverage(projection)
    yield "redundancy", lambda: live.redundancy(0.5)
    yield "philox", lambda: live.uniform()
    priority = live.attention(last_only=True)[:, : config.kv_heads].contiguous()
    victim = lowest(priority, live.protected, live.window)
    yield "lowest", lambda: lowest(priority, live.protected, live.window)

    def freed() -> Tensor:
        tables = [ring.order.clone(), ring.position.clone(), ring.count.clone(), ring.evictions.clone()]
        tables[2].fill_(live.slot.shape[-1])
        free(victim, live.slot, live.window, live.pairs, *tables)
        return torch.cat([table.flatten() for table in tables])

    yield "free", freed
    logits = 4 * normal(lanes, config.vocab_size, of=torch.float32)
    often = normal(lanes, config.vocab_size, of=torch.float32) > 1
    column = torch.ones(lanes, device=device)
    penalties = (logits, logits, 1.2 * column, 0.3 * column, often, often, often, column > 0)
    yield "penalize", lambda: penalize(*penalties)
    filters = Filters(0.6 * column, (20 * column).long(), 0.95 * column, 0.01 * column)
    uniform = torch.rand(lanes, device=device)
    yield "sample", lambda: sample(logits, filters, uniform)
    words = [torch.randint(0, 2**32, (lanes,), device=device) for _ in range(5)]
    yield "philox words", lambda: torch.stack(philox(*words))
    token = torch.arange(lanes, device=device)

    def steered() -> Tensor:
        cursor, left, phase = token % 3 - 2, token % 4 - 1, token % 3
        drawn, forced = steer(token.clone(), token[:, None] + 1, token * 0 + 1, cursor, left, phase, 1, 2)
        active = token % 2 == 0
        return torch.cat([commit(drawn, active, token.clone()), forced, cursor, left, phase, active])

    yield "steer, commit", steered


def transformers_step_ms(config: ModelConfig, lanes: int, length: int, setting: Setting) -> dict[str, Any]:
    """Milliseconds a step of a greedy loop over a static cache of ``length`` tokens; ``why`` says why there is none."""
    try:
        from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache
    except ImportError:
        return {"ms": None, "why": "transformers is not installed"}
    theirs = Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, tie_word_embeddings=config.tie_embeddings,
    )  # fmt: skip
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16).eval()
    cache = StaticCache(config=theirs, max_cache_len=length)
    steps = min(setting.warm + setting.timed, length)
    ids = torch.ones(lanes, steps, dtype=torch.int64, device=setting.device)
    return {"ms": statistics.median(peer_times(model, ids, 1, cache)[min(setting.warm, steps - 1) :]), "why": None}
