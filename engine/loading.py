"""From a checkpoint to a decoder that fits: where it runs, in which type, with which ring and lanes."""

from __future__ import annotations

import logging
import os

import torch

from ringkv.engine.config import RingConfig
from ringkv.engine.memory import settle
from ringkv.errors import RingkvError
from ringkv.kernels.backend import resolve
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.linear import can_pack
from ringkv.models.weights import load_decoder, open_config

log = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def load(
    checkpoint: Checkpoint, device: str, dtype: str, ring: RingConfig, lanes: int | str
) -> tuple[Decoder, RingConfig, int]:
    """The decoder, and the ring and lanes that fit beside it: this is settled before a weight is read."""
    config = ModelConfig.from_hf(checkpoint.config)
    place, number, packs = placed(config, device, dtype)
    ring, lanes = settle(config, ring, lanes, number, place, packed=packs)
    log.info("running in %s on %s, budget %s, %s lanes", dtype, place, ring.budget, lanes)
    decoder = load_decoder(checkpoint, place, number)
    if packs:
        decoder.pack()
    return decoder, ring, lanes


def placed(config: ModelConfig, device: str, dtype: str) -> tuple[torch.device, torch.dtype, bool]:
    """Where and in which type a model runs, and whether its weights alone are packed to float16.

    Raises:
        RingkvError: a device or a type that is not there.
    """
    place = place_of(device)
    packable = place.type == "cpu" and config.moe is None and can_pack()
    if dtype == "auto":
        dtype = config.dtype if place.type == "cuda" else "float16" if packable else "float32"
    if dtype not in DTYPES:
        raise RingkvError.bad("dtype", dtype, f"auto, {', '.join(DTYPES)}")
    packs = dtype == "float16" and packable
    return place, torch.float32 if packs else DTYPES[dtype], packs


def place_of(device: str) -> torch.device:
    """Where a model runs.

    Raises:
        RingkvError: a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise RingkvError.bad("device", device, "auto, cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        raise RingkvError.bad(
            "device", device, "auto, cpu" + (", cuda" if torch.cuda.is_available() else " (no GPU is found)")
        )
    return place


def backend_of(
    model: str | os.PathLike[str],
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    revision: str | None = None,
) -> str:
    """The backend that ``Engine.from_pretrained`` with these options runs on, from the configuration alone."""
    _, keys = open_config(model, revision=revision)
    place, number, _ = placed(ModelConfig.from_hf(keys), device, dtype)
    return resolve(backend, place, number)
