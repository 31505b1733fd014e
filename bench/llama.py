"""Time llama.cpp on the same weights and token ids, if llama-cpp-python is installed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ringkv.apps.measure.bench import Clock
from ringkv.models.checkpoints.open import open_checkpoint

KINDS = ("f16", "q8_0")
STEPS = 24


def installed() -> bool:
    """Whether llama-cpp-python is installed."""
    return find_spec("llama_cpp") is not None


def times(kind: str, ids: Sequence[int], lengths: Iterable[int], threads: int) -> dict[int, tuple[float, float]]:
    """For each length: ms of reading so many of ``ids`` at once, and the median ms of the STEPS steps that follow."""
    from llama_cpp import Llama

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        convert(kind, path)
        model = Llama(str(path), n_ctx=len(ids) + STEPS, n_threads=threads, n_threads_batch=threads, verbose=False)
        for seen in lengths:
            clock = Clock(torch.device("cpu"))
            model.reset()
            clock.mark()
            model.eval(ids[:seen])
            clock.mark()
            for token in ids[seen : seen + STEPS]:
                model.eval([token])
                clock.mark()
            first, *steps = clock.between()
            found[seen] = first, statistics.median(steps)
        model.close()
    return found


def convert(kind: str, target: Path) -> None:
    """Write SmolLM2's GGUF to ``target`` with its matrices in another type; vectors become float32."""
    import gguf

    checkpoint: Any = open_checkpoint("smollm2")
    reader = gguf.GGUFReader(checkpoint.path)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1])
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = gguf.GGMLQuantizationType[kind.upper() if weight.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(weight, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
