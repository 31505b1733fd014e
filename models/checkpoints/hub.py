"""Checkpoints from the Hugging Face hub, through its own client and cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.folder import INDEX, SINGLE, read_index
from ringkv.models.tokenizer import VOCABULARIES

# Beside the weights nothing else is downloaded: no pickles, no second copy under other names, no code.
NEEDED = [
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
]


def fetch(hub_id: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a snapshot in the local hub cache, downloaded if it is not there.

    Args:
        config_only: config.json is all that is downloaded, and all that must be there.

    The weights are the shards that the index names, or ``model.safetensors`` where there is none. The client reads
    the token (``HF_TOKEN`` or a login), ``HF_HUB_OFFLINE`` and ``HF_HOME``. It shows progress bars on a terminal, and
    none where ``HF_HUB_DISABLE_PROGRESS_BARS`` is 1.

    Raises:
        RingkvError: no such repository or revision, gated, offline and not in the cache, a broken cache, or the
            hub cannot be reached.
    """
    from huggingface_hub import snapshot_download, utils

    class Bars(utils.tqdm):
        """The client's own are silent without a terminal, all but the one of the files."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{"disable": None, **options})

    at = hub_id if revision is None else f"{hub_id} at revision {revision!r}"
    try:
        patterns = ["config.json"] if config_only else NEEDED
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, tqdm_class=Bars))
        if not config_only:
            patterns = [*NEEDED, *_further(folder)]
            snapshot_download(hub_id, revision=folder.name, allow_patterns=patterns, tqdm_class=Bars)
    except RingkvError:
        raise
    except Exception as error:
        raise RingkvError(f"{at}: {_reason(error, hub_id)}") from error
    return _whole(folder, at, config_only)


def _reason(error: Exception, hub_id: str) -> str:
    from huggingface_hub import constants, errors

    text = " ".join(str(error).split())
    said = text if len(text) <= 400 else text[:400] + "..."
    if isinstance(error, errors.GatedRepoError):
        terms = f"accept its terms at {constants.ENDPOINT}/{hub_id}"
        return f"this repository is gated: {terms}, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "check the name, or log in with `hf auth login` or set HF_TOKEN"
        return f"the hub has no such repository, or it is private: {remedy}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has the repository, but no such revision"
    if isinstance(error, errors.HFValidationError):
        return f"not a hub id: {said}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return f"{reason}, and the cache {constants.HF_HUB_CACHE} holds no complete copy: {said}"
    # The client lets through the errors of whichever HTTP library it uses, and those of the disk.
    return f"the download failed: {type(error).__name__}: {said}"


def _further(folder: Path) -> list[str]:
    """What else to download, as the index says; without a tokenizer that is read, also the one to name instead."""
    weights = sorted(set(read_index(folder / INDEX).values())) if (folder / INDEX).exists() else [SINGLE]
    return weights if (folder / "tokenizer.json").exists() else [*weights, *VOCABULARIES]


def _whole(folder: Path, at: str, config_only: bool) -> Path:
    """Refuse a snapshot whose links lead nowhere: its blobs were deleted or never arrived."""
    if config_only and (folder / "config.json").exists():
        return folder
    remedy = f"delete {folder.parents[1]} and run again while online"
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists():
            raise RingkvError(
                f"{at}: the cache is broken: {path} points to {os.readlink(path)}, which is not there: {remedy}"
            )
    if not (folder / "config.json").exists() or not any((folder / name).exists() for name in (SINGLE, INDEX)):
        raise RingkvError(
            f"{at}: {folder} holds no config.json with {SINGLE} or {INDEX}: either the repository has none (GGUF and "
            f"pickle repositories are not read from the hub), or the cache is incomplete: then {remedy}"
        )
    return folder
