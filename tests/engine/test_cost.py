"""The byte model against what is really allocated."""

from __future__ import annotations

import pytest
import torch

from ringkv.engine.config import RingConfig
from ringkv.engine.cost import bytes_read, slot_bytes, weight_bytes
from ringkv.engine.memory import Planner
from ringkv.models.config import MoeConfig
from ringkv.models.decoder import Decoder
from tiny import tiny_config

CONFIGS = {
    "qwen3": tiny_config("qwen3"),
    "qwen2, tied": tiny_config("qwen2", tie_embeddings=True, heads=6, kv_heads=3),
    "all biases": tiny_config("llama", qkv_bias=True, o_bias=True, mlp_bias=True, head_dim=24),
    "sparse": tiny_config("qwen3", layers=4, moe=MoeConfig(6, 2, 24, True, (1, 3))),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lanes", [1, 3, 16])
def test_a_step_on_a_full_ring_reads_what_the_plan_holds(name, lanes):
    model, ring = CONFIGS[name], RingConfig(40, 8)
    plan = Planner(model, torch.float16).plan(ring, lanes)
    unread = 0 if model.tie_embeddings else (model.vocab_size - lanes) * model.hidden_size * 2
    if model.moe is not None:
        idle = model.moe.experts - min(model.moe.experts, lanes * model.moe.experts_per_token)
        unread += len(model.moe.layers) * idle * 3 * model.hidden_size * model.moe.intermediate_size * 2
    held = plan.weights_bytes + plan.tables["k"].bytes + plan.tables["v"].bytes
    decoder = Decoder(model, torch.device("meta"), torch.float16)
    assert bytes_read(decoder, lanes, lanes * model.layers * ring.capacity) == held - unread
    assert slot_bytes(model, 2) == plan.token_bytes


def test_packed_weights_are_read_in_two_bytes_and_the_ring_in_four():
    model = CONFIGS["qwen2, tied"]
    decoder = Decoder(model, torch.device("meta"), torch.float32, packed=True)
    tables = Planner(model, torch.float32).plan(RingConfig(40, 8), 3).tables
    held = weight_bytes(model, 3, 2) + tables["k"].bytes + tables["v"].bytes
    assert bytes_read(decoder, 3, 3 * model.layers * 48) == held


def test_by_hand():
    """Two layers of Qwen3-0.6B's kind, counted on paper."""
    model = tiny_config("qwen3", layers=1, heads=2, kv_heads=1)
    attention = 32 * (2 + 2) * 16 + 2 * 16 * 32 + 2 * 32 + 2 * 16
    assert weight_bytes(model, 5, 4) == 4 * (attention + 3 * 32 * 48 + 32 + 97 * 32 + 5 * 32)
