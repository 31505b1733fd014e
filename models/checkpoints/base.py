"""What every source of weights offers: a folder of safetensors, a GGUF file, a state dict in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ringkv.models.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names (``model.layers.0.self_attn.q_proj.weight``), and what describes them.

    Attributes:
        name: what a person calls it, for results and messages.
        config: the keys of ``config.json``.
        generation_config: the keys of ``generation_config.json``; empty where there is none.
    """

    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by name, without reading any."""

    def read(self, name: str, out: Tensor) -> None:
        """Fill ``out`` (of the tensor's shape, any float dtype) in place, with no second copy of a large tensor."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its chat template, or None where the checkpoint holds none."""
