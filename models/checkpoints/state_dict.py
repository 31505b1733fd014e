"""A checkpoint that is in memory already: the state dict of a model, from a trainer or a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.config import ModelConfig
from ringkv.models.keys import short

# The names under which transformers 5 stacks the weights of all experts, and the weights that each of them joins.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class StateDictCheckpoint:
    """See Checkpoint. It holds the tensors that it was given, and has no tokenizer.

    Args:
        tensors: by Hugging Face name, on any device, of any float type.
        config: the keys of a ``config.json``, or the ModelConfig that was made of them.

    Raises:
        RingkvError: a value that is no dense tensor of floats with data, by name.

    Attributes:
        tensors: under the names of a checkpoint's files.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | ModelConfig, name: str = "state dict"
    ) -> None:
        self.name = name
        self.config: Any = config
        self.generation_config: Mapping[str, Any] = {}
        for key, tensor in tensors.items():
            floats = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.itemsize >= 2
            if not floats or tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested:
                raise RingkvError(f"{name}: {key} is {short(tensor)}: accepted is a dense tensor of floats with data")
        self.tensors = dict(_unstacked(tensors))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensors[name].detach())

    def tokenizer(self) -> None:
        return None


def _unstacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of single experts where a model in memory (transformers 5) holds them stacked; files never do."""
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".experts.")
        if not prefix or part not in _STACKED or tensor.dim() != 3:
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = zip(_STACKED[part], weight.chunk(len(_STACKED[part])), strict=True)
            yield from ((f"{prefix}.experts.{expert}.{one}.weight", view) for one, view in parts)
