"""Saved conversations: a file of JSON with messages and sampling options."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.engine import SamplingParams
from ringkv.errors import RingkvError
from ringkv.files import utf8_text, write_whole

FORMAT = "ringkv_chat"
PARAMS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Transcript:
    """A conversation as it is saved.

    Attributes:
        model: what answered.
        messages: {role, content}: a system message if there is one, then user and assistant in turn.
        params: how answers are drawn.
    """

    model: str
    messages: list[dict[str, str]]
    params: SamplingParams

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages without it."""
        return self.messages[self.system is not None :]

    def write(self, path: str | Path) -> None:
        """Write the file so that at every moment it is the old one or the new one.

        Raises:
            RingkvError: it cannot be written.
        """
        params = {name: value for name, value in dataclasses.asdict(self.params).items() if value != PARAMS[name]}
        record = {FORMAT: 1, "model": self.model, "messages": self.messages, "params": params}
        write_whole(_path("save", path), json.dumps(record, indent=1).encode() + b"\n", "save")

    @classmethod
    def read(cls, path: str | Path) -> Transcript:
        """What ``write`` wrote.

        Raises:
            RingkvError: a file that cannot be read, or that holds no conversation.
        """
        file = _path("load", path)
        try:
            return cls._of(json.loads(utf8_text(file.read_bytes())))
        except RingkvError as error:
            raise RingkvError(f"load: {str(path)!r}: {error}") from None
        except OSError as error:
            raise RingkvError(f"load: {str(path)!r}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RingkvError(f"load: {str(path)!r}: it is not JSON in UTF-8 ({error})") from None

    @classmethod
    def _of(cls, record: Any) -> Transcript:
        if not isinstance(record, dict) or record.get(FORMAT) != 1:
            raise RingkvError(f"it is no saved conversation: accepted is an object with {FORMAT} = 1")
        messages, params = record.get("messages"), record.get("params", {})
        if not isinstance(messages, list):
            raise RingkvError.bad("messages", messages, "a list")
        if not isinstance(params, dict):
            raise RingkvError.bad("params", params, "an object")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                raise RingkvError.bad(f"messages[{index}]", message, "an object with role and content")
            if not isinstance(message["content"], str):
                raise RingkvError.bad(f"messages[{index}].content", message["content"], "a text")
        system = bool(messages) and messages[0]["role"] == "system"
        for index, message in enumerate(messages[system:]):
            if message["role"] != _ROLES[index % 2]:
                raise RingkvError.bad(
                    f"messages[{index + system}].role", message["role"], f"{_ROLES[index % 2]!r} here"
                )
        if len(messages[system:]) % 2:
            raise RingkvError("messages: the last one is the user's: accepted is an answer to it")
        for name in params:
            if name not in PARAMS:
                raise RingkvError(f"params: {name} is not known: accepted is {', '.join(PARAMS)}")
        return cls(str(record.get("model")), messages, SamplingParams(**params))


def _path(what: str, path: str | Path) -> Path:
    if not Path(path).name:
        raise RingkvError.bad(what, str(path), "the name of a file")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise RingkvError(f"{what}: {str(path)!r}: {error}") from None
