"""Conversations to ids, where no message can forge a control token, and ids to text as they come."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError
from ringkv.models.keys import refusal
from ringkv.models.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatTemplate", "IncrementalDecoder", "check_messages", "encode_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")

_MAX_DEPTH = 32
# Where guards are taken from: letters that Python and JSON print as they are, and that hardly any text holds.
_RARE = [chr(code) for code in range(0x20000, 0x2A6D7)]
_TRIES = 100


def encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    thinking: bool | None = None,
) -> list[int]:
    """The ids of a conversation, in which only the template writes control tokens.

    They are the ids of the rendered text, in which all that comes from a message is encoded as plain text: names and
    values of its fields, however deep they are nested. The template does not see a control token in a message either,
    so an assistant's thought belongs under the key ``reasoning_content``, or is left out.

    Args:
        messages: see ``check_messages``.
        thinking: see ``ChatTemplate.render``.

    Raises:
        RingkvError: there is no template, the messages are not accepted, or the template fails.
    """
    if template is None:
        raise RingkvError("messages: the model has no chat template; give a prompt in raw mode (--raw)")
    messages = check_messages(messages)
    guard = _Guard(tokenizer.control_tokens, template, messages)
    guarded = [guard.message(message) for message in messages]
    text = guard.found(template.render(guarded, add_generation_prompt=add_generation_prompt, thinking=thinking))
    return tokenizer.encode(text) if guarded == messages else tokenizer.encode_parts(guard.parts(text))


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


class _Guard:
    """Keeps the texts of messages from being taken for control tokens of the template.

    The guard is a character that nothing else holds. In the texts of messages it stands before the last character of
    whatever reads as a control token, and, where a text could become a part of one beside the template's own text,
    before its first and its last character. So a control token of a rendered text is the template's unless the guard
    stands in it or directly before it. A template can take a text apart or change its letters, and whatever is done
    with the text, the guard goes with it.

    Words that the template names, such as the keys that it looks up, are its own: they stay as they are, and so do
    roles.

    Args:
        control_tokens: ids by text.
        messages: checked.
    """

    def __init__(
        self, control_tokens: Mapping[str, int], template: ChatTemplate, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        self._ids = control_tokens
        surroundings = json.dumps([messages, template.source, *control_tokens], ensure_ascii=False).replace(r"\\", "\\")
        used = set(surroundings)
        unused = islice((letter for letter in _RARE if letter not in used), _TRIES)
        self._guard = next((one for one in unused if not any(form in surroundings for form in _forms(one))), "")
        if not self._guard:
            raise RingkvError(f"messages: they hold almost all of {len(_RARE)} rare letters; accepted are fewer")
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile(f"(?<!{self._guard})({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._heads = {text[:end] for text in control_tokens for end in range(1, len(text))}
        self._tails = {text[start:] for text in control_tokens for start in range(1, len(text))}
        self._all = self._guard.join(control_tokens)
        self._names = template.names | {"role"}
        # A template may trim a text. Where control tokens hold blanks, those of the text count.
        self._strip = not any(character.isspace() for text in control_tokens for character in text)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with guards; its role, whose words are known, stays."""
        return {**self._mapped(message), "role": message["role"]}

    def found(self, rendered: str) -> str:
        """A rendered text with all forms of the guard as the guard."""
        for form in _forms(self._guard):
            rendered = rendered.replace(form, self._guard)
        return rendered

    def parts(self, text: str) -> list[str | int]:
        """The template's control tokens in a text as ids, and the texts between them without guards."""
        pieces: list[str | int] = [piece.replace(self._guard, "") for piece in self._pattern.split(text)]
        pieces[1::2] = [self._ids[token] for token in pieces[1::2] if isinstance(token, str)]
        return pieces

    def _mapped(self, value: Any) -> Any:
        """The value with guards in every text of it, keys included."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._mapped(one) for one in value]
        if isinstance(value, dict):
            return {key if key in self._names else self._text(key): self._mapped(one) for key, one in value.items()}
        return value

    def _text(self, text: str) -> str:
        name = text in self._names
        while (guarded := self._pattern.sub(self._broken, text)) != text:
            text = guarded
        core = text.strip() if self._strip else text
        if name or not core or not self._joins(core):
            return text
        before, _, after = text.partition(core)
        return f"{before}{self._guard}{core[:-1]}{self._guard}{core[-1]}{after}"

    def _broken(self, found: re.Match[str]) -> str:
        return f"{found[0][:-1]}{self._guard}{found[0][-1]}"

    def _joins(self, core: str) -> bool:
        """Whether a text could be a part of a control token, or end or begin one."""
        lengths = range(1, 1 + min(len(core), max(map(len, self._ids), default=0)))
        inside = core in self._all
        return inside or any(core[:n] in self._tails or core[-n:] in self._heads for n in lengths)


def _forms(character: str) -> tuple[str, ...]:
    """How JSON in ASCII and Python's ascii() write a rare letter."""
    return json.dumps(character)[1:-1], ascii(character)[1:-1]


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
