"""The plan against what an engine really allocates, and the choices made from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ringkv import Engine, RingConfig, RingkvError
from ringkv.engine import engine as engine_module
from ringkv.engine import loading
from ringkv.engine import memory as plan
from ringkv.engine.live_bytes import LiveBytes
from ringkv.engine.memory import Planner, free_memory, settle
from ringkv.engine.policies import POLICIES, future
from ringkv.engine.policies.statistics import save_statistics
from ringkv.engine.ring import storage
from ringkv.engine.ring.storage import Ring
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import use
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from ringkv.models.config import MoeConfig
from ringkv.models.decoder import Decoder
from ringkv.models.linear import PackedLinear, can_pack
from ringkv.models.weights import load_decoder
from tiny import tiny_config, tiny_decoder, tiny_weights

CPU = torch.device("cpu")


def model_shaped(family="llama", **changes):
    """SmolLM2's proportions, a few layers of it."""
    sizes = {"vocab_size": 4096, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "tie_embeddings": True}
    return tiny_config(family, **{**sizes, "heads": 9, "kv_heads": 3, "layers": 4, **changes})


SHAPES = {
    "as SmolLM2": model_shaped(),
    "as many KV heads": model_shaped(heads=8, kv_heads=8, head_dim=32, hidden_size=256, tie_embeddings=False),
    "one KV head": model_shaped("qwen3", heads=16, kv_heads=1, hidden_size=512, intermediate_size=2048, layers=3),
    "sparse": model_shaped(
        "qwen3", heads=4, kv_heads=2, hidden_size=256, layers=3, moe=MoeConfig(8, 2, 128, True, (1, 2))
    ),
}


@pytest.fixture(scope="module")
def decoders():
    """Random decoders of the shapes, in float32."""
    made = {name: Decoder(config, CPU, torch.float32) for name, config in SHAPES.items()}
    for decoder in made.values():
        for view in decoder.destinations().values():
            view.normal_(std=0.05)
    return made


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["vase-attnv", "h2o", "curdkv", "full"])
def test_the_plan_is_what_an_engine_allocates(policy, dtype, lanes):
    config, ring = tiny_config("qwen2"), RingConfig(48, 8, policy)
    planned = Planner(config, dtype, prompt=8).plan(ring, lanes)
    with Engine(Decoder(config, CPU, dtype), ring=ring, lanes=lanes) as engine:
        assert planned.ring_bytes == engine.ring.nbytes == sum(x.nbytes for x in engine.ring.tensors().values())
        assert planned.ring_bytes == sum(table.bytes for table in planned.tables.values())
        assert planned.scratch_bytes == engine.ring.scratch.nbytes
        assert planned.weights_bytes == engine.model.nbytes
        held = {name: getattr(planned, name) for name in engine.plan()}
        assert held == engine.plan()
        assert planned.full_cache_bytes(56) == engine.ring.k.nbytes + engine.ring.v.nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_planned_to_the_byte(tied):
    config = tiny_config("qwen2", tie_embeddings=tied)
    weights = {
        name: x for name, x in tiny_weights(config, torch.float32).items() if name != "lm_head.weight" or not tied
    }
    with Engine(weights, config=config, dtype="float16") as engine:
        planned = Planner(config, engine.model.dtype, packed=can_pack())
        assert planned.weights_bytes == engine.model.nbytes


@pytest.mark.parametrize("n", [700, 2500])
@pytest.mark.parametrize("policy", ["vase-attnv", "h2o", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prefill_peak_bounds_what_a_prefill_keeps_alive(policy, dtype, n):
    config = model_shaped()
    ring = RingConfig(4096 if policy == "full" else 256, 64, policy, retention="all")
    planned = Planner(config, dtype, prompt=n).prefill_bytes(ring)
    decoder = Decoder(config, CPU, dtype)
    for view in decoder.destinations().values():
        view.normal_(std=0.05)
    with Engine(decoder, ring=ring) as engine:
        engine.ring.reset(0, seed=0)
        with LiveBytes() as live:
            engine._runner.prefill(0, torch.randint(0, 4096, (n,)).tolist())
    assert live.peak <= planned <= 1.15 * live.peak


@pytest.mark.parametrize("retention", ["all", "refreekv"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_prefill_peak_of_every_policy_and_shape(decoders, shape, policy, retention, cpu_path):
    if policy == "full" and retention != "all":
        retention = None
    ring = RingConfig(500 if policy == "full" else 256, 64, policy, retention)
    planned = Planner(SHAPES[shape], torch.float32, prompt=400).prefill_bytes(ring)
    with Engine(decoders[shape], ring=ring) as engine:
        engine.ring.reset(0, seed=0)
        with use(cpu_path), LiveBytes() as live:
            engine._runner.prefill(0, torch.randint(0, 4096, (400,)).tolist())
    assert live.peak <= planned <= 1.15 * live.peak


@pytest.mark.parametrize("n", [1025, 2111, 5001])
@pytest.mark.parametrize("policy", ["vase-attnv", "h2o", "rkv", "curdkv", "expected-attention", "triattention"])
def test_the_first_blocks_stand_for_all(policy, n, monkeypatch):
    """Oracle: the count of all of them."""
    monkeypatch.setattr(storage, "SCRATCH_BYTES", 1 << 20)
    planner, ring = Planner(model_shaped(), torch.float32), RingConfig(256, 64, policy)
    counted = planner.prefill_bytes(ring, n)
    names = ("key_scores", "leverage", "observe", "redundancy", "scores")
    for module in ("models.decoder", "engine.policies.live", *(f"kernels.{name}" for name in names)):
        monkeypatch.setattr(f"ringkv.{module}.blocks", lambda n, size, like: range(0, n, size))
    assert planner.prefill_bytes(ring, n) == counted


def test_a_policy_that_reads_a_file_is_asked_once_and_for_the_whole_model(tmp_path, monkeypatch):
    """The prefill is counted on a model of two layers. Oracle: the ring."""
    config, reads = model_shaped(), []
    mean, modulus = torch.zeros(config.layers, config.heads, 64), torch.zeros(config.layers, config.heads, 32)
    (tmp_path / "stats").write_bytes(save_statistics(mean, modulus, "x", 3))
    load = future.load_statistics
    monkeypatch.setattr(future, "load_statistics", lambda *given: reads.append(given) or load(*given))
    ring = RingConfig("auto", 8, f"triattention:stats={tmp_path / 'stats'}")
    planner = Planner(config, torch.float32)
    planner.prefill_bytes(replace(ring, budget=40))
    most = planner.most_budget(ring, 2, 1 << 28, 1 << 20)
    sized = replace(ring, budget=most)
    planned = planner.plan(sized, 2)
    assert planner.longest_prompt(sized, 1 << 30) > 4096
    assert len(reads) == 1
    assert planned.ring_bytes == Ring(config, sized, 2, CPU, torch.float32).nbytes
    with pytest.raises(RingkvError, match="accepted is float32"):
        Planner(model_shaped(layers=2), torch.float32).plan(sized, 2)


@pytest.mark.parametrize("policy", ["vase-attnv", "full"])
def test_the_longest_prompt_is_the_last_that_fits(policy):
    planner, ring = Planner(model_shaped(), torch.float32), RingConfig(1 << 17, 64, policy)
    memory = planner.prefill_bytes(ring, 30_001)
    assert 29_700 < planner.longest_prompt(ring, memory) <= 30_001
    assert planner.longest_prompt(ring, 1000) == 0
    most = planner.longest_prompt(ring, 1 << 40)
    assert most == ring.capacity if policy == "full" else most > 1 << 20


def test_an_engine_names_the_longest_prompt(monkeypatch):
    monkeypatch.setattr(engine_module, "free_memory", lambda device: 50 << 20)
    with Engine(Decoder(model_shaped(), CPU, torch.float32), ring=RingConfig(48, 8)) as engine:
        longest = engine.longest_prompt()
        planner = Planner(model_shaped(), torch.float32)
        assert planner.prefill_bytes(engine.ring.config, longest) <= 50 << 20
        assert planner.prefill_bytes(engine.ring.config, longest * 102 // 100) > 50 << 20
        engine._check_room(longest)
        with pytest.raises(MemoryError, match=f"^memory: to read .* accepted are up to {longest} tokens$"):
            engine._check_room(longest * 102 // 100)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [500, 4096, 40000])
def test_the_peak_of_loading_packed_weights_is_planned_to_the_byte(tied, vocab, monkeypatch):
    """Packed weights are no tensors: theirs are added to those that live whenever a product has been packed."""
    config = model_shaped("qwen2", tie_embeddings=tied, vocab_size=vocab)
    weights = tiny_weights(config, torch.float32)
    pack, sizes, moments = PackedLinear.pack, {}, []

    def packed(linear, weight):
        pack(linear, weight)
        sizes[linear] = linear.nbytes
        moments.append(live.now + sum(sizes.values()))

    planner = Planner(config, torch.float32, packed=True)
    monkeypatch.setattr(PackedLinear, "pack", packed)
    with LiveBytes() as live:
        decoder = load_decoder(StateDictCheckpoint(weights, config), CPU, torch.float32, packed=True)
    angles = decoder.rope.exponent.nbytes + decoder.rope.inv_freq.nbytes
    assert planner.load_bytes == max(moments) - angles
    assert planner.weights_bytes == live.now + sum(sizes.values()) - angles == decoder.nbytes
    assert moments.index(max(moments)) == (0 if vocab == 40000 else 16), "at the head, or at the last product"


def tensors_of(thing):
    """Every tensor that an object holds, in its lists and dicts too."""
    return [x for x in tree_leaves(list(vars(thing).values())) if isinstance(x, torch.Tensor)]


def test_the_tables_of_a_captured_step_are_planned_to_the_byte():
    for lanes in (1, 5, 16):
        sampler, steering = Sampler(lanes, 4096, CPU, static=True), Steering(lanes, (1, 2), CPU)
        assert sampler.nbytes == sum(x.nbytes for x in {id(x): x for x in tensors_of(sampler)}.values())
        assert steering.nbytes == sum(x.nbytes for x in tensors_of(steering))
        planned = Planner(model_shaped(), torch.float32, captured=True)
        pool = lanes * (3 * 4096 * 4 + 2 * 3 * 2048 * 8)
        assert planned.step_bytes(lanes) == sampler.nbytes + steering.nbytes + pool
        assert Planner(model_shaped(), torch.float32).step_bytes(lanes) == 0


def test_a_captured_step_is_part_of_the_total():
    config, ring = model_shaped(), RingConfig(48, 8)
    eager, captured = (Planner(config, torch.float32, 8, captured=each) for each in (False, True))
    step = captured.step_bytes(2)
    assert captured.plan(ring, 2).total_bytes == eager.plan(ring, 2).total_bytes + step
    assert captured.held_bytes(ring, 2) == eager.held_bytes(ring, 2) + step
    assert captured.most_lanes(ring, captured.plan(ring, 5).total_bytes, 100) == 5


def test_a_gpu_is_refused_what_its_step_does_not_fit(monkeypatch):
    config, ring, gpu = model_shaped(), RingConfig(48, 8), torch.device("cuda")
    planned = Planner(config, torch.float32, captured=True)
    held = planned.weights_bytes + planned.held_bytes(ring, 2)
    settle(config, ring, 2, torch.float32, gpu, free=held)
    with pytest.raises(RingkvError, match="ring, scratch and step"):
        settle(config, ring, 2, torch.float32, gpu, free=held - 1)


def test_live_bytes_counts_what_lives_and_not_views_or_writes_in_place():
    before = torch.zeros(100)
    with LiveBytes() as live:
        one = torch.zeros(1000)
        two = one + 1
        view = two.view(10, 100)[1:]
        one.add_(1)
        before.add_(1)
        del two
        assert live.now == live.peak == 8000  # the view holds what was deleted
        del view, one
        assert live.now == 0
    assert live.peak == 8000


def test_lanes_and_budget_are_the_most_that_fit():
    planner, ring = Planner(tiny_config(), torch.float32, prompt=64), RingConfig(48, 8)
    for lanes in (1, 5):
        total = planner.plan(ring, lanes).total_bytes
        assert planner.most_lanes(ring, total, 100) == lanes
        assert planner.most_lanes(ring, total - 1, 100) == lanes - 1
        assert planner.most_budget(ring, lanes, total, 1000) == 48
        assert planner.most_budget(ring, lanes, total - 1, 1000) == 47
    assert planner.most_lanes(ring, 1 << 40, 7) == 7
    assert planner.most_budget(ring, 1, 1 << 40, 77) == 77
    assert planner.most_budget(ring, 1, 1000, 77) == 0


def test_auto_takes_what_fits_and_leaves_a_tenth(monkeypatch):
    config, ring = tiny_config(), RingConfig("auto", 8)
    planner = Planner(config, torch.float32)
    wanted = planner.plan(replace(ring, budget=500), 3).total_bytes
    monkeypatch.setattr(plan, "free_memory", lambda device: int(wanted / 0.9) + 1)
    assert settle(config, ring, 3, torch.float32, CPU) == (replace(ring, budget=500), 3)
    assert settle(config, replace(ring, budget=500), "auto", torch.float32, CPU)[1] == 3
    monkeypatch.setattr(plan, "free_memory", lambda device: 1 << 40)
    chosen, lanes = settle(config, ring, "auto", torch.float32, CPU)
    assert (chosen.budget, lanes) == (16384, 16)


@pytest.mark.parametrize("way", ["a name", "a state dict", "a decoder"])
def test_options_are_checked_and_memory_is_settled_once(way, tiny_checkpoint, monkeypatch):
    calls = []
    for module, name in ((engine_module, "_check_options"), (loading, "resolve_runtime"), (loading, "settle")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, spy(calls, name, function))
    monkeypatch.setattr(loading, "load_decoder", spy(calls, "load_decoder", load_decoder))
    monkeypatch.setattr(engine_module, "open_checkpoint", spy(calls, "open_checkpoint", open_checkpoint))
    ring, config = RingConfig(48, 8), tiny_config()
    if way == "a name":
        Engine.from_pretrained(tiny_checkpoint("llama"), ring=ring)
        assert calls == ["_check_options", "open_checkpoint", "resolve_runtime", "settle", "load_decoder"]
    elif way == "a state dict":
        Engine(tiny_weights(config), config=config, ring=ring)
        assert calls == ["_check_options", "resolve_runtime", "settle", "load_decoder"]
    else:
        Engine(tiny_decoder(config, tiny_weights(config)), ring=ring)
        assert calls == ["_check_options", "settle"]


def spy(calls, name, function):
    """``function``, with its name noted in ``calls`` at each call."""
    return lambda *args, **options: (calls.append(name), function(*args, **options))[1]


def test_an_engine_settles_auto_and_keeps_it(monkeypatch):
    config = tiny_config()
    monkeypatch.setattr(plan, "MOST_BUDGET", 100)
    monkeypatch.setattr(plan, "MOST_LANES", 2)
    weights = tiny_weights(config, torch.float32)
    for model in ({"model": weights, "config": config}, {"model": tiny_decoder(config, weights)}):
        with Engine(**model, ring=RingConfig("auto", 8), lanes="auto") as engine:
            assert (engine.ring.config.budget, engine.lanes, engine.ring.lanes) == (100, 2, 2)


def test_what_cannot_fit_is_refused_with_the_arithmetic(monkeypatch):
    config, ring = tiny_config(), RingConfig(48, 8)
    planned = Planner(config, torch.float32).plan(ring, 2)
    held = planned.weights_bytes + planned.ring_bytes + planned.scratch_bytes
    monkeypatch.setattr(plan, "free_memory", lambda device: held)
    settle(config, ring, 2, torch.float32, CPU)
    monkeypatch.setattr(plan, "free_memory", lambda device: held - 1)
    settle(config, ring, 2, torch.float32, CPU, loaded=True)
    with pytest.raises(RingkvError, match=r"^memory: weights .* \+ ring and scratch .*budget 48 .*2 lanes.* are free"):
        settle(config, ring, 2, torch.float32, CPU)
    with pytest.raises(RingkvError, match="memory: "):
        Engine(tiny_weights(config, torch.float32), config=config, ring=ring, lanes=2, dtype="float32")


def test_what_cannot_be_loaded_is_refused_with_the_arithmetic(monkeypatch):
    config, ring = model_shaped(vocab_size=150_000), RingConfig(48, 8)
    planner = Planner(config, torch.float32, packed=True)
    assert planner.plan(ring, 1).total_bytes == planner.load_bytes
    monkeypatch.setattr(plan, "free_memory", lambda device: planner.load_bytes)
    settle(config, ring, 1, torch.float32, CPU, packed=True)
    monkeypatch.setattr(plan, "free_memory", lambda device: planner.load_bytes - 1)
    settle(config, ring, 1, torch.float32, CPU, packed=True, loaded=True)
    with pytest.raises(RingkvError, match=r"^memory: loading takes .* for weights that then take .* are free on cpu$"):
        settle(config, ring, 1, torch.float32, CPU, packed=True)
    assert planner.most_lanes(ring, planner.load_bytes, 1) == 1
    assert planner.most_lanes(ring, planner.load_bytes - 1, 1) == 0
    assert planner.most_budget(ring, 1, planner.load_bytes, 60) == 60
    assert planner.most_budget(ring, 1, planner.load_bytes - 1, 60) == 0


@pytest.mark.parametrize("value", ["many", 0, 1.5, None, True])
def test_neither_int_nor_auto_is_refused(value):
    with pytest.raises(RingkvError, match=r"budget = .*accepted is an int >= 1 or 'auto'"):
        RingConfig(value)
    with pytest.raises(RingkvError, match=r"lanes = .*accepted is an int >= 1 or 'auto'"):
        Engine({}, config={}, lanes=value)
    with pytest.raises(RingkvError, match="an engine chooses it"):
        _ = RingConfig("auto").capacity


def test_free_memory_is_found():
    free = free_memory(CPU)
    assert free is not None
    assert 1 << 20 < free < 1 << 50
