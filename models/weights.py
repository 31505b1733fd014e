"""Filling a decoder from a checkpoint: names and shapes must fit before any memory is taken."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import EMBEDDING, HEAD, Decoder
from ringkv.models.keys import short

# Buffers that old checkpoints carry; the decoder computes its own.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Numbers that are looked at together: on a CPU they fit its cache in float32, and a GPU would wait for smaller ones.
_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24


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
    held = _dtypes(decoder)

    def read(name: str, out: Tensor) -> None:
        checkpoint.read(name, out)
        if out.dtype == torch.float16 and not out.any():  # what was not zero may have become it
            exact = torch.empty_like(out, dtype=torch.float32, device="cpu")
            checkpoint.read(name, exact)
            out = exact
        _check_range(checkpoint, name, out, held[name])

    decoder.fill(read)
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


def load_weights(decoder: Decoder, checkpoint: StateDictCheckpoint) -> None:
    """Set every parameter of a decoder in place, exactly once; nothing is set if something does not fit.

    Raises:
        RingkvError: tensors are missing, unexpected or of the wrong shape (they are listed), a head differs from the
            embedding that the configuration ties it to, or the decoder's dtype cannot hold what is in a tensor.
    """
    _check(decoder, checkpoint)
    for name, dtype in _dtypes(decoder).items():
        _check_range(checkpoint, name, checkpoint.tensors[name], dtype)
    decoder.fill(checkpoint.read)


def _dtypes(decoder: Decoder) -> dict[str, torch.dtype]:
    """In which dtype each tensor of a checkpoint is held: products that are packed have a view on the meta device."""
    views = decoder.destinations().items()
    return {name: decoder.weight_dtype if view.is_meta else view.dtype for name, view in views}


def _check_range(checkpoint: Checkpoint, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor with NaN or infinity, and one that a dtype cannot hold: too large, or too small as a whole.

    FBGEMM would pack NaN and what is too large as numbers. And a matrix whose largest number is below the smallest
    normal one would keep few of its bits, or none.
    """
    try:
        largest = _largest(x)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise RingkvError(f"{checkpoint.name}: tensor {short(name)} cannot be read: {why}") from error
    limits = torch.finfo(dtype)
    if not largest <= limits.max:
        found = "NaN" if math.isnan(largest) else f"infinity, or numbers beyond {limits.max:g}"
    elif x.dim() > 1 and 0 < largest < limits.tiny:
        found = f"no number above {largest:.3g}"
    else:
        return
    raise RingkvError(
        f"{checkpoint.name}: tensor {short(name)} holds {found}: accepted in {str(dtype).removeprefix('torch.')} are "
        f"finite numbers, the largest from {limits.tiny:.3g} to {limits.max:g}"
        + (", and more with dtype = 'float32'" if dtype == torch.float16 and not math.isnan(largest) else "")
    )


def _largest(x: Tensor) -> float:
    """The largest magnitude in a tensor; NaN where one number is NaN."""
    x, wide = x.detach(), torch.promote_types(x.dtype, torch.float32)
    rows = max(1, (_BLOCK if x.device.type == "cpu" else _GPU_BLOCK) * len(x) // x.numel())
    # A plain copy of each block, so that what cannot be copied is found before anything is written.
    blocks = (torch.empty(part.shape, dtype=wide, device=x.device).copy_(part) for part in x.split(rows))
    ends = [end for block in blocks for end in torch.aminmax(block)]
    return float(torch.stack(ends).abs().amax())


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
