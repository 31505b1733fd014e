"""Filling a decoder from a checkpoint: names and shapes must fit before any memory is taken."""

from __future__ import annotations

import re

import torch

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import EMBEDDING, HEAD, Decoder
from ringkv.models.keys import short

# Buffers that old checkpoints carry; the decoder computes its own.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_decoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, packed: bool = False) -> Decoder:
    """The decoder of a checkpoint, with its weights; names and shapes are checked before memory is taken.

    Args:
        device, dtype, packed: see ``Decoder``.

    Raises:
        RingkvError: see ``read_config`` and ``load_weights``.
    """
    config, found = read_config(checkpoint), len(checkpoint.shapes())
    experts = config.moe.experts * len(config.moe.layers) if config.moe else 0
    if max(config.layers, experts) > found:
        raise RingkvError(
            f"{checkpoint.name}: {found} tensors are too few for num_hidden_layers = {config.layers}"
            + (f" with {experts} experts in all" if experts else "")
        )
    _check(Decoder(config, torch.device("meta"), dtype), checkpoint)
    decoder = Decoder(config, device, dtype, packed=packed)
    decoder.fill(checkpoint.read)
    return decoder


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """What the configuration of a checkpoint describes.

    Raises:
        RingkvError: see ``ModelConfig.from_hf``; it names the checkpoint too.
    """
    try:
        return ModelConfig.from_hf(checkpoint.config)
    except RingkvError as error:
        raise RingkvError(f"{checkpoint.name}: {error}") from error


def load_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Set every parameter of a decoder in place, exactly once; nothing is set if something does not fit.

    Raises:
        RingkvError: tensors are missing, unexpected or of the wrong shape (they are listed), or a head differs from
            the embedding that the configuration ties it to.
    """
    _check(decoder, checkpoint)
    decoder.fill(checkpoint.read)


def _check(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Compare names and shapes, and a head with the embedding that it is tied to."""
    found = checkpoint.shapes()
    wanted = {name: tuple(view.shape) for name, view in decoder.destinations().items()}
    missing = [name for name in wanted if name not in found]
    if decoder.config.tie_embeddings:
        wanted[HEAD] = wanted[EMBEDDING]
    problems = {
        "missing": missing,
        "unexpected": [name for name in found if name not in wanted and not _ROTARY_BUFFER.fullmatch(name)],
        "wrong shape": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise RingkvError(f"{checkpoint.name}: the tensors do not fit the configuration: {listed}")
    if decoder.config.tie_embeddings and HEAD in found:
        _check_tied(decoder, checkpoint)


def _check_tied(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """transformers 4 ties such a head to the embedding, transformers 5 does not: it must not matter."""
    embedding, head = (torch.empty(decoder.embedding.shape, dtype=decoder.dtype) for _ in range(2))
    checkpoint.read(EMBEDDING, embedding)
    checkpoint.read(HEAD, head)
    if not torch.equal(embedding, head):
        raise RingkvError(
            f"{checkpoint.name}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: accepted is "
            "tie_word_embeddings = false, or equal tensors"
        )


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() and len(name) < 200 else short(name) for name in names[:most]) + rest
