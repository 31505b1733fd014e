"""Saved conversations: a file of JSON with messages and sampling options."""

from __future__ import annotations

import dataclasses
import json
import secrets
from itertools import cycle
from pathlib import Path
from typing import Any

from ringkv.engine import SamplingParams, Snapshot
from ringkv.errors import RingkvError, naming
from ringkv.files import beside, utf8_text, write_whole

FORMAT = "ringkv_chat"
PARAMS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}

Messages = list[dict[str, str]]


def write_transcript(
    path: str | Path, model: str, messages: Messages, params: SamplingParams, ring: Snapshot | None = None
) -> None:
    """Write the file so that at every moment it is the old one or the new one.

    The ring lies beside it. A mark in both says that they belong together: a process may end between the two.

    Args:
        model: what answered.
        messages: {role, content}: a system message if there is one, then user and assistant in turn.
        params: how answers are drawn.
        ring: what the conversation goes on from.

    Raises:
        RingkvError: it cannot be written.
    """
    changed = {name: value for name, value in dataclasses.asdict(params).items() if value != PARAMS[name]}
    record: dict[str, Any] = {FORMAT: 1, "model": model, "messages": messages, "params": changed}
    if ring is not None:
        record["ring"] = secrets.token_hex(8)
        marked = dataclasses.replace(ring, about={**ring.about, "chat": record["ring"]})
        marked.save(ring_path(path), "save")
    write_whole(_path("save", path), json.dumps(record, indent=1).encode() + b"\n", "save")


def ring_path(path: str | Path) -> Path:
    """Where the ring of a conversation lies."""
    return beside(_path("save", path), ".thought")


def read_transcript(path: str | Path) -> tuple[Messages, SamplingParams, str | None]:
    """The messages and the params that ``write_transcript`` wrote, and the mark of the ring beside them, if any.

    Raises:
        RingkvError: a file that cannot be read, or that holds no conversation.
    """
    file = _path("load", path)
    with naming(f"load: {str(path)!r}", "it is not JSON in UTF-8", (ValueError, RecursionError)):
        record = json.loads(utf8_text(file.read_bytes()))
        if not isinstance(record, dict) or record.get(FORMAT) != 1:
            raise RingkvError(f"it is no saved conversation: accepted is an object with {FORMAT} = 1")
        messages, params = record.get("messages"), record.get("params", {})
        if not isinstance(messages, list):
            raise RingkvError.bad("messages", messages, "a list")
        if not isinstance(params, dict):
            raise RingkvError.bad("params", params, "an object")
        roles, last = cycle(("user", "assistant")), "assistant"
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                raise RingkvError.bad(f"messages[{index}]", message, "an object with role and content")
            if not isinstance(message["content"], str):
                raise RingkvError.bad(f"messages[{index}].content", message["content"], "a text")
            if index == 0 and message["role"] == "system":
                continue
            if message["role"] != (last := next(roles)):
                raise RingkvError.bad(f"messages[{index}].role", message["role"], f"{last!r} here")
        if last == "user":
            raise RingkvError("messages: the last one is the user's: accepted is an answer to it")
        for name in params:
            if name not in PARAMS:
                raise RingkvError(f"params: {name} is not known: accepted is {', '.join(PARAMS)}")
        ring = record.get("ring")
        return messages, SamplingParams(**params), ring if isinstance(ring, str) else None


def _path(what: str, path: str | Path) -> Path:
    if not Path(path).name:
        raise RingkvError.bad(what, str(path), "the name of a file")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RingkvError(f"{what}: {str(path)!r}: {error}") from None
