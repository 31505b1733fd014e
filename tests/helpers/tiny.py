"""Tiny random decoders, without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder

FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


def tiny_config(
    family: str = "llama", *, heads: int = 4, kv_heads: int = 2, layers: int = 3, **changes: object
) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": family,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 16,
        "rms_eps": 1e-6,
        "rope": RopeConfig(theta=10000.0),
        "max_position_embeddings": 4096,
        "tie_embeddings": False,
    }
    return ModelConfig(**{**values, **FAMILIES[family], **changes})  # type: ignore[arg-type]


def tiny_weights(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Random weights whose attention is far from uniform, so that a wrong token in it is seen."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: view.shape for name, view in Decoder(config, torch.device("cpu"), dtype).destinations().items()}
    weights = {}
    for name, shape in shapes.items():
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            draw = 1 + 0.2 * draw
        elif name.endswith("bias"):
            draw = 0.5 * draw
        elif "embed" in name:
            pass
        else:
            draw = draw * (3.0 if "q_proj" in name or "k_proj" in name else 1.0) / shape[-1] ** 0.5
        weights[name] = draw.to(dtype)
    return weights


def tiny_decoder(config: ModelConfig, weights: dict[str, Tensor]) -> Decoder:
    dtype = weights["model.embed_tokens.weight"].dtype
    decoder = Decoder(config, torch.device("cpu"), dtype)
    for name, view in decoder.destinations().items():
        view.copy_(weights[name])
    return decoder
