"""Files of query statistics, which ``triattention`` reads: ours, and those that its authors released."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.files import refusing
from ringkv.models.config import ModelConfig

FORMAT = "ringkv query statistics"
NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")
FIELD = "policy triattention: stats"


def save_statistics(mean: Tensor, modulus: Tensor, digest: str, tokens: int) -> bytes:
    """A safetensors file of the means of queries and of their pairs' moduli, before RoPE.

    Args:
        mean: [L, Hq, D]. modulus: [L, Hq, D/2].
        digest: of the model; see ``Decoder.digest``.
        tokens: how many queries these are the means of.
    """
    tensors = dict(zip(NAMES, (*mean.chunk(2, -1), modulus), strict=True))
    about = {"format": FORMAT, "weights": digest, "tokens": str(tokens)}
    return save({name: x.float().cpu().contiguous() for name, x in tensors.items()}, about)


def load_statistics(path: str, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """What ``save_statistics`` was given: mean float32 [L, Hq, D], modulus float32 [L, Hq, D/2]. Nothing is trusted.

    A file of the authors is a torch archive of ``stats``, three tensors for each ``layer%02d_head%02d``.

    Raises:
        RingkvError: it cannot be read, is of neither format, or has not the sizes of this model.
    """
    shape = model.layers, model.heads, model.head_dim // 2
    with refusing(Path(path), FIELD):
        size = Path(path).stat().st_size
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:  # what a member unpacks to may be far more
                size = max(size, sum(member.file_size for member in archive.infolist()))
        # A tensor of an archive is a member with a header, and has an entry in the list of them and in the pickle.
        most = (1 << 20) + 3 * model.layers * model.heads * (model.head_dim * 4 + 2048)
        if size > most:
            raise RingkvError(f"{FIELD} = {path!r}: {size} bytes; accepted are at most {most} for this model")
        try:
            parts = _released(path, model) if zipfile.is_zipfile(path) else _own(path)
        except (SafetensorError, pickle.UnpicklingError, ValueError, TypeError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise RingkvError(f"{FIELD} = {path!r}: not what ringkv calibrate writes ({reason})") from None
    for name, part in zip(NAMES, parts, strict=True):
        if part.shape != shape or part.dtype != torch.float32 or not part.isfinite().all():
            given = f"{name} is {str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
            raise RingkvError(f"{FIELD} = {path!r}: {given}; accepted is float32 {list(shape)}, all of it finite")
    return torch.cat(parts[:2], -1), parts[2]


def made_for(path: str) -> str | None:
    """The digest of the model that a file of ours was made for; None for one of the authors, which names none."""
    if zipfile.is_zipfile(path):
        return None
    with safe_open(path, framework="pt") as file:
        digest: str | None = (file.metadata() or {}).get("weights")
    return digest


def _own(path: str) -> list[Tensor]:
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ValueError("it has another format")
        if "model" in file.metadata():
            raise ValueError("an older ringkv made it, which did not tell a model from its fine-tunes: make it anew")
        return [file.get_tensor(name) for name in NAMES]


def _released(path: str, model: ModelConfig) -> list[Tensor]:
    file: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    stats, style = file["stats"], file["metadata"].get("rope_style", "half")
    if style != "half":
        raise ValueError(f"rope_style is {style!r}, not 'half'")
    heads = [[f"layer{layer:02d}_head{head:02d}" for head in range(model.heads)] for layer in range(model.layers)]
    if set(stats) != {name for row in heads for name in row}:
        raise ValueError(f"it has {len(stats)} heads, not {model.layers} layers of {model.heads}")
    return [torch.stack([torch.stack([stats[head][name] for head in row]) for row in heads]) for name in NAMES]
