"""Loading: random checkpoints saved by transformers give transformers' logits, damaged ones are refused by name."""

from __future__ import annotations

import torch
import pytest
from typing import Any
from ringkv.models.weights import load_decoder, open_checkpoint

CPU = torch.device("cpu")

VARIANTS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "smollm3": ("smollm3", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tiny_checkpoint, our_logits, their_logits) -> None:
    family, config = VARIANTS[variant]
    folder = tiny_checkpoint(family, **config)
    decoder = load_decoder(open_checkpoint(folder), CPU, torch.float32)
    for n in (1, 7, 100):
        ids = torch.arange(n) * 31 % 160
        wanted = their_logits(folder, ids)
        assert (our_logits(decoder, ids) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
