"""Conversations to ids, where no message can forge a control token, and ids to text as they come."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError
from ringkv.models.keys import refusal
from ringkv.models.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatTemplate", "IncrementalDecoder", "check_messages", "encode_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")

_MAX_DEPTH = 32
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")  # an area for private use, which hardly any text uses


def encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    thinking: bool | None = None,
) -> list[int]:
    """The ids of a conversation, in which only the template writes control tokens.

    Where a message holds the text of one, the template sees a placeholder in its stead, and the text is encoded as
    the plain text it is. Where none does, the ids are those of the rendered text. BOS is there if the template
    prints it. Since the template does not see the tags in a message either, an assistant's thought belongs under
    the key ``reasoning_content``, or is left out.

    Args:
        messages: see ``check_messages``.
        thinking: see ``ChatTemplate.render``.

    Raises:
        RingkvError: there is no template, the messages are not accepted, or the template fails.
    """
    if template is None:
        raise RingkvError("messages: the model has no chat template; give a prompt in raw mode (--raw)")
    messages = check_messages(messages)
    escape = _Escape(tokenizer.control_tokens, json.dumps(messages, ensure_ascii=False) + template.source)
    escaped = [_mapped(message, escape) for message in messages]
    text = template.render(escaped, add_generation_prompt=add_generation_prompt, thinking=thinking)
    return tokenizer.encode(text) if escaped == messages else tokenizer.encode_parts(escape.parts(text))


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of a conversation in plain JSON types, without keys that are None.

    A message has a ``role`` of ``ROLES`` and a text as its ``content``, which may be absent beside ``tool_calls``.
    Other keys are left to the template.

    Raises:
        RingkvError: a message is something else; it is named by its index, counted from 0.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise refusal("messages", messages, "a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise refusal(at, message, "an object with role and content")
        plain = {key: value for key, value in _plain(message, at).items() if value is not None}
        if plain.get("role") not in ROLES:
            raise refusal(f"{at}.role", plain.get("role"), ", ".join(ROLES))
        if not isinstance(plain.get("content", "" if plain.get("tool_calls") else None), str):
            raise refusal(f"{at}.content", plain.get("content"), "a text")
        checked.append(plain)
    return checked


class IncrementalDecoder:
    """Turns ids into text one at a time, in whole characters.

    What ``push`` returns, and ``flush`` at the end, joins to ``tokenizer.decode`` of all ids. The bytes of a character
    are held until it is whole; bytes that cannot become one are U+FFFD at once. Special ids print nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop = tokenizer.drops_space

    def push(self, id: int) -> str:
        """The text that this id completes."""
        return self._text(b"" if id in self._tokenizer.special_ids else self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is held when no id follows: U+FFFD for half a character."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._drop and text:
            self._drop = False
            return text.removeprefix(" ")
        return text


class _Escape:
    """Placeholders for the control tokens in the texts of one conversation.

    Args:
        control_tokens: ids by text.
        surroundings: everything that placeholders must not occur in.
    """

    def __init__(self, control_tokens: Mapping[str, int], surroundings: str) -> None:
        self._ids = control_tokens
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._heads = tuple(text[:end] for text in control_tokens for end in range(1, len(text)))
        self._tails = tuple(text[start:] for text in control_tokens for start in range(1, len(text)))
        used = set(_PRIVATE.findall(surroundings))
        self._private = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        self._guard = next(self._private)
        self._placeholders: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """The text without control tokens, and with guards at edges that could become half of one."""
        text = self._pattern.sub(self._placeholder, text)
        core = text.strip()
        if core.startswith(self._tails) or core.endswith(self._heads):
            before, _, after = text.partition(core)
            return f"{before}{self._guard}{core}{self._guard}{after}"
        return text

    def parts(self, rendered: str) -> list[str | int]:
        """The template's control tokens as ids, and the texts between them as they were."""
        restored = {ord(placeholder): text for text, placeholder in self._placeholders.items()}
        restored[ord(self._guard)] = ""
        pieces: list[str | int] = [piece.translate(restored) for piece in self._pattern.split(rendered)]
        pieces[1::2] = [self._ids[token] for token in pieces[1::2] if isinstance(token, str)]
        return pieces

    def _placeholder(self, found: re.Match[str]) -> str:
        if found[0] not in self._placeholders:
            self._placeholders[found[0]] = next(self._private)
        return self._placeholders[found[0]]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed; roles, whose words are known, stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(one, change) for one in value]
    if isinstance(value, dict):
        return {key: one if key == "role" else _mapped(one, change) for key, one in value.items()}
    return value


def _plain(value: Any, at: str, depth: int = 0) -> Any:
    """The value rebuilt from JSON's types, so that a template meets only their methods."""
    if depth > _MAX_DEPTH:
        raise RingkvError(f"{at}: nested deeper than {_MAX_DEPTH}")
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): _plain(one, f"{at}.{key}", depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, f"{at}[{index}]", depth + 1) for index, one in enumerate(value)]
    raise refusal(at, value, "JSON: a text, a number, true, false, null, a list or an object")
