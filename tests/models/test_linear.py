"""Weights packed in half precision: what is rounded, what is not, and who asks for it."""

from __future__ import annotations

import pytest
import torch

import ringkv.models.linear
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.models.linear import Linear, PackedLinear, can_pack
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(budget=40, window=8)
PARAMS = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_this_machine_can_pack():
    """CI's processors are x86 with AVX2; elsewhere the plain product is the one to test."""
    assert can_pack()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("size", [(1, 1), (33, 47), (576, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_only_the_weights_are_rounded(rows, size, bias):
    weight, x = random(*size), random(rows, size[1], seed=1)
    shift = random(size[0], seed=2) if bias else None
    got = Linear(weight, shift).packed()(x)
    exact = x.double() @ weight.half().double().T + (0 if shift is None else shift.double())
    # n products and a bias summed in float32: n + 1 roundings, each at most half an ulp of the sum of magnitudes.
    magnitudes = x.abs().double() @ weight.half().abs().double().T + (0 if shift is None else shift.abs().double())
    bound = (size[1] + 1) * 2.0**-24 * magnitudes
    assert got.dtype == torch.float32
    assert ((got - exact).abs() <= bound).all()


def test_a_row_does_not_depend_on_the_others():
    linear, x = PackedLinear(random(65, 96), None), random(9, 96, seed=1)
    whole = linear(x)
    for i in range(9):
        assert torch.equal(linear(x[i : i + 1])[0], whole[i])


def test_a_packed_decoder_is_the_one_with_rounded_weights():
    """Tokens of a decoder whose products round their weights beforehand; norms and biases are not rounded."""
    config = tiny_config("qwen2", tie_embeddings=True)
    weights = tiny_weights(config, torch.float32)
    rounded = {name: x if name.endswith(("norm.weight", "bias")) else x.half().float() for name, x in weights.items()}
    packed = Engine(weights, config=config, ring=RING, dtype="float16")
    plain = Engine(tiny_decoder(config, rounded), ring=RING)
    ids = list(range(50))
    done, want = packed.generate(ids, PARAMS), plain.generate(ids, PARAMS)
    assert done.token_ids == want.token_ids
    assert done.dtype == {"weights": "float16", "compute": "float32", "ring": "float32"}
    assert torch.allclose(packed.score(ids), plain.score(ids), rtol=0, atol=1e-4)
    products = sum(x.numel() for name, x in weights.items() if not name.endswith(("norm.weight", "bias")))
    others = sum(x.nbytes for name, x in weights.items() if name.endswith(("norm.weight", "bias")))
    twice = weights["model.embed_tokens.weight"].numel()
    assert packed.model.nbytes == 2 * (products + twice) + others


def test_weights_of_a_packed_engine_are_replaced_or_left():
    config = tiny_config()
    engine = Engine(tiny_weights(config, torch.float32), config=config, ring=RING, dtype="float16")
    model, old = engine.model, engine.generate([1, 2, 3], PARAMS).token_ids
    engine.update_weights(tiny_weights(config, torch.float32, seed=1))
    new = engine.generate([1, 2, 3], PARAMS).token_ids
    fresh = Engine(tiny_weights(config, torch.float32, seed=1), config=config, ring=RING, dtype="float16")
    assert new == fresh.generate([1, 2, 3], PARAMS).token_ids != old
    assert engine.model is model
    broken = tiny_weights(config, torch.float32)
    del broken["model.norm.weight"]
    with pytest.raises(RingkvError, match=r"model\.norm\.weight"):
        engine.update_weights(broken)
    assert engine.generate([1, 2, 3], PARAMS).token_ids == new


@pytest.mark.parametrize("available, weights", [(True, "float16"), (False, "float32")])
def test_auto_asks(available, weights, monkeypatch):
    monkeypatch.setattr("ringkv.engine.loading.can_pack", lambda: available)
    config = tiny_config()
    done = Engine(tiny_weights(config, torch.float32), config=config, ring=RING).generate([1, 2], PARAMS)
    assert done.dtype == {"weights": weights, "compute": "float32", "ring": "float32"}


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_torch_without_the_product_says_no(error, monkeypatch):
    def missing(weight, bias):
        raise error("no such operator")

    monkeypatch.setattr(ringkv.models.linear, "PackedLinear", missing)
    assert ringkv.models.linear.can_pack.__wrapped__() is False


def test_only_a_dense_float32_decoder_is_packed():
    config = tiny_config()
    with pytest.raises(ValueError, match="dense decoder in float32"):
        tiny_decoder(config, tiny_weights(config, torch.float64)).pack()
