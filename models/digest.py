"""Which weights a model has, in a few digits that cost next to nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from ringkv.models.config import ModelConfig

SAMPLE = 4096  # numbers of a tensor that count, evenly spread; all of a smaller one
_LEAST = 2.0**-16  # float16 cannot hold all that is smaller and that bfloat16 can


def sample(weights: Tensor) -> bytes:
    """What counts of a tensor, as bfloat16: a checkpoint in bfloat16 or float16 gives the same in every dtype."""
    flat = weights.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // SAMPLE)].to("cpu", torch.float32)
    return bytes(some.where(some.abs() >= _LEAST, 0.0).to(torch.bfloat16).view(torch.int16).numpy())


def mark(weights: Tensor) -> bytes:
    """The sample of a tensor, hashed: a mixture has tens of thousands of tensors, and all of this is kept."""
    return hashlib.sha256(sample(weights)).digest()


def digest(config: ModelConfig, marks: Mapping[str, bytes]) -> str:
    """16 hex digits that tell a model from others, and from a fine-tune of it.

    Args:
        config: all of it counts but the checkpoint's own dtype and the tokens that end a text.
        marks: of every tensor of the checkpoint, by name.
    """
    sizes = dataclasses.asdict(dataclasses.replace(config, dtype="", eos_ids=()))
    sha = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    for name in sorted(marks):
        sha.update(f"{name} {len(marks[name])} ".encode() + marks[name])
    return sha.hexdigest()[:16]
