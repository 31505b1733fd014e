"""Weights packed in half precision: what is rounded, what is not, and who asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import ringkv.models.linear
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.models.config import MoeConfig
from ringkv.models.decoder import Decoder
from ringkv.models.linear import PackedLinear, can_pack
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(budget=40, window=8)
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(weight, bias=None):
    linear = PackedLinear(weight.shape, bias)
    linear.pack(weight)
    return linear


def test_this_machine_can_pack():
    """CI's processors are x86 with AVX2; elsewhere the plain product is the one to test."""
    assert can_pack()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("size", [(1, 1), (33, 47), (576, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_only_the_weights_are_rounded(rows, size, bias):
    weight, x = random(*size), random(rows, size[1], seed=1)
    shift = random(size[0], seed=2) if bias else None
    got = packed(weight, shift)(x)
    exact = x.double() @ weight.half().double().T + (0 if shift is None else shift.double())
    # n products and a bias summed in float32: n + 1 roundings, each at most half an ulp of the sum of magnitudes.
    magnitudes = x.abs().double() @ weight.half().abs().double().T + (0 if shift is None else shift.abs().double())
    bound = (size[1] + 1) * 2.0**-24 * magnitudes
    assert got.dtype == torch.float32
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 12, 16])
def test_a_row_depends_neither_on_the_others_nor_on_its_place(rows):
    """With as many rows as a step has (see ``Runner``); of other numbers FBGEMM computes some by another kernel."""
    linear, row = packed(random(65, 96)), random(1, 96, seed=1)
    results = []
    for place in range(rows):
        x = random(rows, 96, seed=2 + place)
        x[place] = row
        results.append(linear(x)[place])
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_packed_decoder_is_the_one_with_rounded_weights():
    """Tokens of a decoder whose products round their weights beforehand; norms and biases are not rounded."""
    config = tiny_config("qwen2", tie_embeddings=True)
    weights = tiny_weights(config, torch.float32)
    rounded = {name: x if name.endswith(("norm.weight", "bias")) else x.half().float() for name, x in weights.items()}
    half = Engine(weights, config=config, ring=RING, dtype="float16")
    plain = Engine(tiny_decoder(config, rounded), ring=RING)
    ids = list(range(50))
    done, want = half.generate(ids, PARAMS), plain.generate(ids, PARAMS)
    assert done.token_ids == want.token_ids
    assert done.dtype == {"weights": "float16", "compute": "float32", "ring": "float32"}
    assert torch.allclose(half.score(ids), plain.score(ids), rtol=0, atol=1e-4)
    # Counted on paper: a layer's products, the head and the embedding in float16, the first two with 512 inputs each,
    # since no product here has more; norms and biases in float32.
    outputs = 3 * ((4 + 2 * 2) * 16 + 32 + 2 * 48 + 32) + 97
    others = 4 * (3 * ((4 + 2 * 2) * 16 + 2 * 32) + 32)
    assert half.model.nbytes == 2 * (512 * outputs + 97 * 32) + others


PACKING = """
import torch
from pathlib import Path
from ringkv.models.linear import PackedLinear

def resident():
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])

PackedLinear((8, 8), None).pack(torch.ones(8, 8))
shape = 40_000, {inputs}
linear, weight = PackedLinear(shape, None), torch.ones(shape)
before = resident()
linear.pack(weight)
print((resident() - before) / linear.nbytes)
"""


@pytest.mark.parametrize("inputs", [511, 576, 1024])
def test_packed_weights_take_what_is_told(inputs, tmp_path):
    """By what the system says of the process."""
    command = [sys.executable, "-c", PACKING.format(inputs=inputs)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert 0.99 < float(done.stdout) < 1.01


def _inputs(linear):
    return (linear.shape if isinstance(linear, PackedLinear) else linear.weight.shape)[1]


def held(model):
    """What a decoder holds, by value: the parameters, and each product's answer to one and the same row."""
    products = [model.head, *(x for each in model.layers for x in (each.qkv, each.o, each.mlp.gate_up, each.mlp.down))]
    parameters = [x.clone() for x in model.destinations().values() if not x.is_meta]
    return [model.embedding.clone(), *parameters, *(linear(torch.ones(1, _inputs(linear))) for linear in products)]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_packed_engine_are_replaced_in_place_or_left(tied):
    config = tiny_config("qwen2", tie_embeddings=tied)
    old, new = (tiny_weights(config, torch.float32, seed=seed) for seed in (0, 1))
    if tied:
        old["lm_head.weight"] = old["model.embed_tokens.weight"]
    engine = Engine(old, config=config, ring=RING, dtype="float16")
    fresh = Engine(new, config=config, ring=RING, dtype="float16")
    model, layer, embedding = engine.model, engine.model.layers[1], engine.model.embedding
    before = held(model)

    def refused(message, **changes):
        broken = {name: x for name, x in {**new, **changes}.items() if x is not None}
        with pytest.raises(RingkvError, match=message):
            engine.update_weights(broken)
        assert all(torch.equal(x, y) for x, y in zip(held(model), before, strict=True)), message

    refused(r"missing: model\.norm\.weight", **{"model.norm.weight": None})
    refused(r"unexpected: model\.extra", **{"model.extra": torch.ones(1)})
    refused(r"wrong shape: model\.layers\.2\.mlp\.down_proj", **{"model.layers.2.mlp.down_proj.weight": torch.ones(1)})
    refused("accepted is a dense tensor of floats", **{"model.layers.2.mlp.down_proj.weight": torch.ones(32, 48).int()})
    if tied:
        refused("lm_head.weight differs", **{"lm_head.weight": new["model.embed_tokens.weight"] + 1})

    engine.update_weights(new)
    assert engine.model is model
    assert model.layers[1] is layer
    assert model.embedding is embedding
    assert all(torch.equal(x, y) for x, y in zip(held(model), held(fresh.model), strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(held(model), before, strict=True))
    ids = list(range(50))
    assert engine.generate(ids, PARAMS).token_ids == fresh.generate(ids, PARAMS).token_ids


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"])
@pytest.mark.parametrize(
    "change, refused_in, told",
    [
        (lambda x: x.index_fill(0, torch.tensor(5), torch.nan), ("float16", "float32"), "holds NaN"),
        (lambda x: x.index_fill(1, torch.tensor(5), torch.inf), ("float16", "float32"), "holds infinity"),
        (lambda x: x.index_fill(0, torch.tensor(5), -65536.0), ("float16",), "holds infinity, or numbers beyond 65504"),
        (lambda x: x / x.abs().amax() * 6e-5, ("float16",), "holds no number above 6e-05"),
        (lambda x: x / x.abs().amax() * 1e-9, ("float16",), "holds no number above 1e-09"),
        (lambda x: x / x.abs().amax() * 65504, (), ""),
        (torch.zeros_like, (), ""),
    ],
)
def test_a_tensor_that_its_dtype_cannot_hold_is_refused(name, change, refused_in, told, dtype):
    config = tiny_config(tie_embeddings=True)
    weights = tiny_weights(config, torch.float32)
    engine = Engine(weights, config=config, ring=RING, dtype=dtype)
    before = held(engine.model)
    bad = {**weights, f"{name}.weight": change(weights[f"{name}.weight"])}
    if dtype not in refused_in:
        engine.update_weights(bad)
        Engine(bad, config=config, ring=RING, dtype=dtype)
        return
    with pytest.raises(RingkvError, match=rf"'{name}.weight' {told}.*finite numbers"):
        engine.update_weights(bad)
    assert all(torch.equal(x, y) for x, y in zip(held(engine.model), before, strict=True))
    with pytest.raises(RingkvError, match=rf"'{name}.weight' {told}.*finite numbers"):
        Engine(bad, config=config, ring=RING, dtype=dtype)


@pytest.mark.parametrize("available, weights", [(True, "float16"), (False, "float32")])
def test_auto_asks(available, weights, monkeypatch):
    monkeypatch.setattr("ringkv.engine.loading.can_pack", lambda: available)
    config = tiny_config()
    done = Engine(tiny_weights(config, torch.float32), config=config, ring=RING).generate([1, 2], PARAMS)
    assert done.dtype == {"weights": weights, "compute": "float32", "ring": "float32"}


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_torch_without_the_product_says_no(error, monkeypatch):
    def missing(self, weight):
        raise error("no such operator")

    monkeypatch.setattr(PackedLinear, "pack", missing)
    assert ringkv.models.linear.can_pack.__wrapped__() is False


@pytest.mark.parametrize("dtype, moe", [(torch.float64, None), (torch.float32, MoeConfig(4, 2, 24, True, (1,)))])
def test_only_a_dense_float32_decoder_is_packed(dtype, moe):
    with pytest.raises(ValueError, match="dense decoder in float32"):
        Decoder(tiny_config(moe=moe), torch.device("cpu"), dtype, packed=True)
