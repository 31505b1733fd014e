"""What the tests of loading share: both models' logits for a text, without any cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.models.decoder import Decoder, Layer

Logits = Callable[..., Tensor]


def _ours(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits [n, vocab] of a decoder under plain causal attention."""
    config = decoder.config
    angles = decoder.angles(torch.arange(len(ids)), len(ids))

    def attention(layer: Layer, qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in decoder.split(layer, qkv, angles[layer.index]))
        k, v = (x.repeat_interleave(config.group, dim=0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    return decoder.logits(decoder.forward(ids, attention))


@pytest.fixture(scope="session")
def our_logits() -> Logits:
    """(decoder, ids [n]) -> [n, vocab]."""
    return torch.no_grad()(_ours)


@pytest.fixture(scope="session")
def their_logits() -> Logits:
    """(folder, ids [n], weights=None) -> [n, vocab], from transformers in float32."""

    @torch.no_grad()
    def logits(folder: Path, ids: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        from transformers import AutoConfig, AutoModelForCausalLM

        if weights is None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
            model.load_state_dict(dict(weights))
        return model.eval()(ids[None]).logits[0]

    return logits
