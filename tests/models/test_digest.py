"""The digest of a model's weights: the same however they are held, another for any other weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringkv import Engine
from ringkv.engine.config import RingConfig
from ringkv.engine.loading import load
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.digest import SAMPLE, sample
from tiny import tiny_config, tiny_decoder, tiny_weights

CONFIG = tiny_config("qwen3")


def digest(weights, config=CONFIG):
    return tiny_decoder(config, weights).digest


def test_the_dtype_does_not_count():
    weights = tiny_weights(CONFIG, torch.bfloat16)
    weights["model.norm.weight"][:3] = torch.tensor([2.0**-20, -(2.0**-16), 2.0**-24])
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert len({digest({name: x.to(kind) for name, x in weights.items()}) for kind in kinds}) == 1


def test_any_weight_counts():
    """One number in any tensor, in a tensor that counts as a whole; and the configuration."""
    weights = tiny_weights(CONFIG, torch.float32)
    seen = {digest(weights)}
    for name, x in weights.items():
        changed = x.clone()
        changed.view(-1)[0] += 1.0
        seen.add(digest({**weights, name: changed}))
    seen.add(digest(weights, replace(CONFIG, rms_eps=1e-5)))
    assert len(seen) == len(weights) + 2
    assert digest(weights, replace(CONFIG, dtype="bfloat16", eos_ids=(3,))) in seen


def test_numbers_are_spread_over_a_large_tensor():
    x = torch.ones(SAMPLE * 10 + 7)
    assert SAMPLE <= len(sample(x)) // 2 <= SAMPLE * 1.1
    before = sample(x)
    x[-1000:] = 2
    assert sample(x) != before


@pytest.mark.parametrize("tie", [False, True])
def test_packing_and_new_weights(tiny_checkpoint, tie):
    """Packed weights keep the digest of what they were packed from; weights that are set anew have another."""
    folder = tiny_checkpoint("qwen3", dtype="bfloat16", tie_word_embeddings=tie)
    digests = set()
    for dtype in ("float32", "float16", "bfloat16"):
        options = {"device": "cpu", "dtype": dtype, "backend": "torch"}
        model, *_ = load(open_checkpoint(folder), RingConfig(24, 8), 1, **options)
        digests.add(model.digest)
    (before,) = digests
    with Engine.from_pretrained(folder, ring=RingConfig(24, 8), device="cpu") as engine:
        assert engine.model.digest == before
        own = open_checkpoint(folder)
        tensors = {name: torch.empty(shape) for name, shape in own.shapes().items()}
        for name, x in tensors.items():
            own.read(name, x)
        engine.update_weights(tensors)
        assert engine.model.digest == before
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.01
        engine.update_weights(tensors)
        assert engine.model.digest != before
