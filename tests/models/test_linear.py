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


def test_a_row_does_not_depend_on_the_others():
    linear, x = packed(random(65, 96)), random(9, 96, seed=1)
    whole = linear(x)
    for i in range(9):
        assert torch.equal(linear(x[i : i + 1])[0], whole[i])


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


def held(model):
    """What a decoder holds, by value: the parameters, and each product's answer to one and the same row."""
    products = [model.head, *(x for each in model.layers for x in (each.qkv, each.o, each.mlp.gate_up, each.mlp.down))]
    parameters = [x.clone() for x in model.destinations().values() if not x.is_meta]
    return [model.embedding.clone(), *parameters, *(linear(torch.ones(1, linear.shape[1])) for linear in products)]


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
    refused("accepted is a tensor of floats", **{"model.layers.2.mlp.down_proj.weight": torch.ones(32, 48).int()})
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


def test_the_embedding_and_a_tied_head_saturate_apart():
    """Beyond float16 a row of the embedding is infinite, and a packed weight the largest number, as FBGEMM rounds."""
    config = tiny_config(tie_embeddings=True)
    weights = tiny_weights(config, torch.float32)
    weights["model.embed_tokens.weight"][5] = 1e6
    model = Engine(weights, config=config, ring=RING, dtype="float16").model
    assert torch.equal(model.embedding, weights["model.embed_tokens.weight"].half())
    x = random(3, 32)
    assert torch.equal(model.head(x), packed(weights["model.embed_tokens.weight"].clone())(x))


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
