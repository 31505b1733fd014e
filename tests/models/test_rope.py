"""RoPE against transformers' own rotary embedding, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.rope import Rope

END = 60_000
CPU = torch.device("cpu")
# All short positions, every 7th after them, and a run at the far end.
POSITIONS = torch.cat([torch.arange(1, 600), torch.arange(600, END - 300, 7), torch.arange(END - 300, END + 1)])

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 5e6},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 1.7},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6},
    {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, "factor": 32.0, "low_freq_factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", **YARN, "attention_factor": 0.9},
    {"rope_type": "yarn", **YARN, "beta_fast": 20, "beta_slow": 2.5, "truncate": False},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    {"rope_type": "yarn", **YARN, "mscale": 0.7},
]


def hf_config(head_dim: int, max_position: int, **rope: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        **rope,
    }


def ours(config: dict[str, Any]) -> Rope:
    built = ModelConfig.from_hf(config)
    return Rope(built.rope, built.head_dim, built.max_position_embeddings, CPU)


def layouts(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The one meaning as transformers 5, transformers 4, and transformers 4 before ``rope_type`` write it."""
    scaling = {key: value for key, value in case.items() if key != "rope_theta"}
    theta = {"rope_theta": case.get("rope_theta", 10000.0)}
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    return [
        {"rope_parameters": case | theta},
        {"rope_parameters": scaling, **theta},
        {"rope_scaling": scaling, **theta},
        {"rope_scaling": older, **theta},
        {"rope_scaling": scaling | older, **theta},
    ]


def agree(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        half = other.shape[-1] // 2
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 72, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_angles_equal_transformers(case: dict[str, Any], head_dim: int) -> None:
    config = hf_config(head_dim, 131072, rope_parameters=dict(case))
    reference = LlamaRotaryEmbedding(LlamaConfig(**config))
    wanted = reference(torch.zeros(1), POSITIONS[None])
    assert (wanted[0][0, 0] != wanted[0][0, -1]).any()
    for layout in layouts(case):
        rope = ours(hf_config(head_dim, 131072, **layout))
        agree(rope.cos_sin(POSITIONS, length=END + 1), wanted)
        agree(rope.cos_sin(POSITIONS.to(torch.int32)), wanted)


@pytest.mark.parametrize("factor", [1.0, 1.7, 8.0])
@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 10_001, END])
def test_dynamic_depends_on_the_length_alone(factor: float, length: int) -> None:
    config = hf_config(64, 4096, rope_theta=10000.0, rope_scaling={"rope_type": "dynamic", "factor": factor})
    positions = torch.arange(max(0, length - 5000), length)
    wanted = LlamaRotaryEmbedding(LlamaConfig(**config))(torch.zeros(1), positions[None])
    rope = ours(config)
    agree(rope.cos_sin(positions, length), wanted)
    agree(rope.cos_sin(positions, torch.tensor(length)), wanted)
    # A length of its own for each position, as lanes of a batch have.
    batch = rope.cos_sin(positions[[0, -1]], torch.tensor([2 * END, length]))
    agree((batch[0][1:], batch[1][1:]), (wanted[0][:, -1:], wanted[1][:, -1:]))
    assert factor == 1.0 or (rope.inv_freq != rope._stretched(torch.tensor(2 * END))).any()


@pytest.mark.parametrize("case", [case for case in CASES if case["rope_type"] != "dynamic"])
def test_only_dynamic_depends_on_the_length(case: dict[str, Any]) -> None:
    rope = ours(hf_config(64, 64, rope_parameters=case))
    assert torch.equal(rope.cos_sin(POSITIONS, 10 * END)[0], rope.cos_sin(POSITIONS)[0])


def test_gguf_factors_divide_the_frequencies() -> None:
    factors = tuple(1.0 + index for index in range(8))
    config = hf_config(16, 64, rope_scaling={"rope_type": "gguf_factors", "factors": list(factors)})
    rope = ours(config)
    plain = Rope(RopeConfig(), 16, 64, CPU)
    assert torch.equal(rope.inv_freq, plain.inv_freq / torch.tensor(factors))


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_shapes_and_devices(kind: str) -> None:
    rope = Rope(RopeConfig(kind, factor=2.0), 16, 64, torch.device("meta"))
    cos, sin = rope.cos_sin(torch.zeros(3, 5, dtype=torch.int64, device="meta"), torch.full((3, 1), 99, device="meta"))
    assert cos.shape == sin.shape == (3, 5, 8)
    assert cos.device.type == "meta"
