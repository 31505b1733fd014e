"""From a checkpoint to a decoder that fits: where it runs, in which dtype, by which backend, beside which ring."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ringkv.engine.config import RingConfig
from ringkv.engine.memory import settle
from ringkv.errors import RingkvError
from ringkv.kernels.backend import resolve as resolve_backend
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.linear import can_pack
from ringkv.models.weights import load_decoder, read_config

log = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Runtime:
    """How a model runs: the options of an engine, once what was "auto" is decided.

    Attributes:
        device: where the weights and the ring lie.
        dtype: of activations and ring, and of the weights unless they are packed.
        packed: the weights are packed to float16 (see ``Decoder``).
        backend: "torch", "triton" or "native".
    """

    device: torch.device
    dtype: torch.dtype
    packed: bool
    backend: str


def load(
    model: Decoder | Checkpoint, ring: RingConfig, lanes: int | str, *, device: str, dtype: str, backend: str
) -> tuple[Decoder, str, RingConfig, int]:
    """A decoder, the backend that it runs on, and the ring and the lanes that fit beside it.

    All of it is settled before a weight is read. A decoder that is in memory runs where it lies, in its own dtype.

    Raises:
        RingkvError: what is not accepted, does not fit the memory, or is wrong with the checkpoint, by name.
    """
    if isinstance(model, Decoder):
        backend = resolve_backend(backend, model.device, model.dtype)
        return model, backend, *settle(model.config, ring, lanes, model.dtype, model.device, loaded=True)
    config = read_config(model)
    runtime = resolve_runtime(config, device=device, dtype=dtype, backend=backend)
    ring, lanes = settle(config, ring, lanes, runtime.dtype, runtime.device, packed=runtime.packed)
    log.info("running in %s on %s, budget %s, %s lanes", dtype, runtime.device, ring.budget, lanes)
    decoder = load_decoder(model, runtime.device, runtime.dtype, packed=runtime.packed)
    return decoder, runtime.backend, ring, lanes


def resolve_runtime(
    config: ModelConfig, *, device: str = "auto", dtype: str = "auto", backend: str = "auto"
) -> Runtime:
    """How a model of this configuration runs under these options of an engine; nothing is loaded.

    Raises:
        RingkvError: a device, a dtype or a backend that is not there, by name.
    """
    torch_device = resolve_device(device)
    torch_dtype, packed = resolve_dtype(config, torch_device, dtype)
    return Runtime(torch_device, torch_dtype, packed, resolve_backend(backend, torch_device, torch_dtype))


def resolve_device(device: str) -> torch.device:
    """The device that an option names; "auto" is the GPU if there is one.

    Raises:
        RingkvError: a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise RingkvError.bad("device", device, "auto, cpu, cuda or cuda:N") from None
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        raise RingkvError.bad(
            "device", device, "auto, cpu" + (", cuda" if torch.cuda.is_available() else " (no GPU is found)")
        )
    return found


def resolve_dtype(config: ModelConfig, device: torch.device, dtype: str) -> tuple[torch.dtype, bool]:
    """The dtype that an option names for a model on a device, and whether its weights alone are packed to float16.

    "auto" is the checkpoint's own on a GPU. On a CPU it is "float16" where weights can be packed, else "float32".

    Raises:
        RingkvError: a dtype that is not there.
    """
    packable = device.type == "cpu" and config.moe is None and can_pack()
    if dtype == "auto":
        dtype = config.dtype if device.type == "cuda" else "float16" if packable else "float32"
    if dtype not in DTYPES:
        raise RingkvError.bad("dtype", dtype, f"auto, {', '.join(DTYPES)}")
    packed = dtype == "float16" and packable
    return torch.float32 if packed else DTYPES[dtype], packed
