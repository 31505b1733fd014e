"""Rotary position embedding: the angles of any position, computed when they are needed, without a table."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringkv.models.config import ModelConfig, RopeConfig


class Rope:
    """cos and sin for every kind of RoPE, as transformers computes them in float32.

    The float32 operations have the same order as in transformers, since one unit in the last place of a frequency is an
    error of 4e-3 in a cosine at position 60,000.

    Args:
        config: the kind and its numbers.
        head_dim: D.
        max_position_embeddings: the length beyond which ``dynamic`` stretches.
        device: where the angles are computed.

    Attributes:
        scale: the factor of cos and sin; 1 except for ``yarn``.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_position_embeddings: int, device: torch.device) -> None:
        self.config, self.head_dim, self.max_position = config, head_dim, max_position_embeddings
        self.scale = _attention_factor(config)
        # Computed on the CPU, because the last bit of a power differs between devices.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        self.exponent = exponent.to(device)  # [D/2]
        self.inv_freq = _inv_freq(config, exponent, head_dim, max_position_embeddings).to(device)  # [D/2]

    def cos_sin(self, position: Tensor, length: Tensor | int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of some positions.

        Args:
            position: [...], of any integer type.
            length: the number of tokens seen when these are rotated, these included; an int, or a tensor that
                broadcasts to ``position``. Only ``dynamic`` depends on it, and does not stretch without it.

        Returns:
            Two float32 tensors [..., D/2].
        """
        inv_freq = self.inv_freq
        if self.config.kind == "dynamic" and length is not None:
            inv_freq = self._stretched(torch.as_tensor(length, device=inv_freq.device))
        angle = position.to(torch.float32)[..., None] * inv_freq
        return angle.cos() * self.scale, angle.sin() * self.scale

    def _stretched(self, length: Tensor) -> Tensor:
        """The frequencies [..., D/2] of ``dynamic`` (NTK-aware scaling) for texts of ``length`` [...] tokens."""
        factor, trained, dim = self.config.factor, self.max_position, self.head_dim
        stretch = factor * length.to(torch.float32) / trained - (factor - 1)
        base = self.config.theta * stretch ** (dim / (dim - 2))
        stretched = 1.0 / base[..., None] ** self.exponent
        return torch.where(length[..., None] > trained, stretched, self.inv_freq)


def layer_frequencies(model: ModelConfig) -> Tensor:
    """``inv_freq`` of each layer, [L, D/2] on the CPU; 0 in layers without RoPE."""
    rope = Rope(model.rope, model.head_dim, model.max_position_embeddings, torch.device("cpu"))
    return torch.stack([rope.inv_freq * (layer not in model.nope_layers) for layer in range(model.layers)])


def _inv_freq(config: RopeConfig, exponent: Tensor, head_dim: int, max_position: int) -> Tensor:
    inv_freq = 1.0 / config.theta**exponent
    if config.kind == "linear":
        inv_freq = inv_freq / config.factor
    elif config.kind == "dynamic":
        trained = (config.factor * max_position / max_position) - (config.factor - 1)
        inv_freq = 1.0 / (config.theta * trained ** (head_dim / (head_dim - 2))) ** exponent
    elif config.kind == "llama3":
        inv_freq = _llama3(config, inv_freq)
    elif config.kind == "yarn":
        inv_freq = _yarn(config, exponent, head_dim)
    elif config.kind == "gguf_factors":
        inv_freq = inv_freq / torch.tensor(config.factors, dtype=torch.float32, device="cpu")
    return inv_freq


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones are kept, and those in between are blended."""
    assert config.original_max_position_embeddings is not None
    low, high = config.low_freq_factor, config.high_freq_factor
    original = config.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    stretched = torch.where(wavelength > original / low, inv_freq / config.factor, inv_freq)
    blended = (1 - smooth) * stretched / config.factor + smooth * stretched
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, stretched)


def _yarn(config: RopeConfig, exponent: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions, from kept to stretched frequencies."""
    assert config.original_max_position_embeddings is not None
    original, theta = config.original_max_position_embeddings, config.theta

    def dimension(rotations: float) -> float:
        """The dimension that makes so many turns over the original length."""
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    power = theta**exponent
    return 1.0 / (config.factor * power) * (1 - kept) + 1.0 / power * kept


def _attention_factor(config: RopeConfig) -> float:
    """The factor of cos and sin in YaRN; the attention scores get its square."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
