"""transformers beside us: the same checkpoint, the same token ids, the same clock."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ringkv.apps.measure.bench import Clock, Run, speeds
from ringkv.engine.engine import Engine
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.open import open_checkpoint

PEERS = ("transformers",)


def check_peer(name: str) -> None:
    """Refuse a peer that is not known or not installed; nothing is imported.

    Raises:
        RingkvError: by name.
    """
    if name not in PEERS:
        raise RingkvError.bad("compare", name, " or ".join(PEERS))
    if find_spec(name) is None:
        raise RingkvError(f"compare: {name} is not installed: pip install '{name}>=5' accelerate")


def load_peer(model: str, device: torch.device, dtype: torch.dtype, revision: str | None = None) -> Any:
    """transformers' model with the weights of a checkpoint, named as ``Engine.from_pretrained`` takes it.

    Raises:
        RingkvError: nothing is there, or transformers cannot load it.
    """
    checkpoint: Any = open_checkpoint(model, revision=revision)
    path = getattr(checkpoint, "path", None)  # a GGUF file; else it is a folder
    where = {"gguf_file": path.name} if path is not None else {}
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # for its progress bar over a GGUF
        from transformers import AutoModelForCausalLM

        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                path.parent if path is not None else checkpoint.folder, dtype=dtype, local_files_only=True, **where
            )
        except Exception as error:  # whatever its loaders, and those of the quantisation, raise
            text = " ".join(str(error).split())[:300]
            raise RingkvError(f"compare: transformers cannot load {checkpoint.name}: {text}") from error
    return loaded.to(device).eval()


def compare(engine: Engine, peer: Any, prompt: Sequence[int], runs: Mapping[int, Run]) -> Iterator[dict[str, Any]]:
    """The peer's figures over the same token ids as runs of an engine, a row for each.

    Args:
        engine: whose threads are used.
        peer: what ``load_peer`` gave.
        prompt: what the runs read.
        runs: by number of lanes.
    """
    with engine._limits():
        for lanes, run in runs.items():
            ids = torch.tensor([[*prompt, *drawn[:-1]] for drawn in run.tokens], device=peer.device)
            peer_times(peer, ids[:, : len(prompt) + 2], len(prompt))  # warms up
            first, *steps = peer_times(peer, ids, len(prompt))
            named = {"peer": "transformers", "dtype": str(peer.dtype).removeprefix("torch."), "lanes": lanes}
            yield named | speeds(first, lanes * len(prompt) / first, steps, lanes)


@torch.inference_mode()
def peer_times(model: Any, ids: Tensor, prompt: int, cache: Any = None) -> list[float]:
    """Milliseconds of reading the prompt, and of each token after it, as a greedy loop has them.

    Every token's successor is drawn and read by the host, and then the next given id is fed: so both engines can be
    timed on one text.

    Args:
        ids: [B, n], on the model's device.
        prompt: how many of them are read at once.
        cache: of transformers; None is the one that grows.

    Returns:
        [1 + n - prompt] milliseconds.
    """
    clock, start = Clock(ids.device), 0
    # transformers 5.24 calls it cache, and before past_key_values.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    clock.mark()
    for end in range(prompt, ids.shape[1] + 1):
        out = model(ids[:, start:end], **{name: cache}, use_cache=True, logits_to_keep=1)
        cache, start = out[name], end
        out.logits[:, -1].argmax(-1).tolist()
        clock.mark()
    return clock.between()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers reports on every load, and would not be heard here."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
