"""Conversations to ids, where no message can forge a control token, and ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ringkv.engine.text.guard import Guard
from ringkv.engine.text.templates import ChatTemplate
from ringkv.engine.text.thoughts import ThoughtTags
from ringkv.errors import RingkvError
from ringkv.models.keys import refusal
from ringkv.models.tokenizer import Tokenizer

__all__ = ["ROLES", "ChatTemplate", "Conversation", "IncrementalDecoder", "check_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool")

_SYSTEM = ("system", "developer")
_THOUGHT = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 32


class Conversation:
    """A conversation as its chat template renders it, in which only the template writes control tokens.

    All that comes from a message is plain text: names and values of its fields, however deep they are nested. The
    template does not see a control token in a message either, so an assistant's thought belongs under the key
    ``reasoning_content``, or is left out.

    Args:
        messages: see ``check_messages``.
        thinking: see ``ChatTemplate.render``.
        tags: of the model's thoughts. Where they are texts, those in a message are not the template's either.

    Raises:
        RingkvError: there is no template, the messages are not accepted, or the template fails.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        tags: ThoughtTags | None = None,
    ) -> None:
        if template is None:
            raise RingkvError("messages: the model has no chat template; give a prompt in raw mode (--raw)")
        self._tokenizer, self.template, self._thinking, self._tags = tokenizer, template, thinking, tags
        messages = check_messages(messages)
        texts = () if tags is None else (tags.open, tags.close)
        self._guard = Guard(tokenizer.control_tokens, template, messages, texts)
        self._messages = [self._guard.message(message) for message in messages]
        self._plain = self._messages == messages
        self._text = self._render(self._messages)

    @property
    def ids(self) -> list[int]:
        """Those of the rendered text, in which what comes from messages is encoded as plain text."""
        text = self._text
        return self._tokenizer.encode(text) if self._plain else self._tokenizer.encode_parts(self._guard.parts(text))

    def begins_inside(self) -> bool:
        """Whether the generation prompt opens a thought: whether the last tag in what it adds is the opening one.

        Tags further up do not count, whoever wrote them. Where the template adds nothing, or cannot do without the
        generation prompt, only an opening tag at the very end does.
        """
        if self._tags is None:
            return False
        texts = (self._tags.open, self._tags.close)
        last = next((tag for tag in reversed(self._guard.found(self._text)) if tag[0] in texts), None)
        if last is None or last[0] != self._tags.open:
            return False
        without = self._try(self._messages, prompt=False)
        if without is None or without == self._text:
            return not self._text[last.end() :].strip()
        return last.end() > _shared(without, self._text)

    def system_ids(self) -> int | None:
        """How many of the ids hold the system message, which the first messages are, and all that stands before it.

        Its text is found in the rendered conversation by a mark at its end. What ends its turn belongs to it, where the
        template renders the system message by itself so.

        Returns:
            None where there is no system message, and 0 where the template does not write all of its text.
        """
        if not self._system_words:
            return None
        marked, mark = self._with_mark(), self._guard.mark
        end = marked.find(mark)
        if end < 0 or marked.replace(mark, "") != self._text:
            return 0
        end = max(end, _shared(self._try(self._system, prompt=False) or "", self._text))
        end = min([end, *(tag.start() for tag in self._guard.found(self._text) if tag.start() < end < tag.end())])
        before = self._guard.parts(self._text[:end])
        return self._tokenizer.count_before([*before, *self._guard.parts(self._text[end:])], len(before))

    def ids_without_prompt(self) -> list[int]:
        """The ids of the messages alone: no answer begins behind them."""
        return self._tokenizer.encode_parts(self._guard.parts(self._render(self._messages, prompt=False)))

    def ids_after(self, count: int, inside: bool) -> list[int]:
        """The ids of what is rendered behind the first messages.

        Args:
            count: how many messages are left out.
            inside: whether the turn of the last of these is still open, so that what ends it comes first.

        Raises:
            RingkvError: the template does not write the others behind these.
        """
        last, mark = count - 1, self._guard.mark
        marked = [*self._messages]
        marked[last] = {**marked[last], "content": marked[last]["content"] + mark}
        text = self._render(marked)
        end = text.find(mark) + 1
        if not inside:
            before = self._try(marked[:count], prompt=False)
            end = len(before) if before and text.startswith(before) else 0
        if not end or text.count(mark) != 1:
            raise RingkvError("append: the chat template does not write messages behind what was read; give a text")
        before_parts = self._guard.parts(text[:end].replace(mark, ""))
        parts = [*before_parts, *self._guard.parts(text[end:])]
        return self._tokenizer.encode_parts(parts)[self._tokenizer.count_before(parts, len(before_parts)) :]

    def leaves_out_system(self) -> bool:
        """Whether there is a system message, and the template does not write it."""
        words = self._system_words
        return bool(words) and words not in self._text and self._guard.mark not in self._with_mark()

    @property
    def _system(self) -> list[dict[str, Any]]:
        return [*takewhile(lambda message: message["role"] in _SYSTEM, self._messages)]

    @property
    def _system_words(self) -> str:
        """The text of the last system message without the blanks around it."""
        return str(self._system[-1].get("content", "")).strip() if self._system else ""

    def _with_mark(self) -> str:
        """The rendered text with a mark behind the words of the system message; "" where the template fails on it."""
        last = len(self._system) - 1
        before, words, after = self._messages[last]["content"].partition(self._system_words)
        marked = {**self._messages[last], "content": f"{before}{words}{self._guard.mark}{after}"}
        return self._try([*self._messages[:last], marked, *self._messages[last + 1 :]]) or ""

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = True) -> str:
        try:
            return self._guard.gathered(
                self.template.render(messages, add_generation_prompt=prompt, thinking=self._thinking)
            )
        except RingkvError as error:
            raise RingkvError(self._guard.removed(str(error))) from error

    def _try(self, messages: Sequence[Mapping[str, Any]], prompt: bool = True) -> str | None:
        try:
            return self._render(messages, prompt)
        except RingkvError:
            return None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of a conversation in plain JSON types, without keys that are None.

    A message has a ``role`` of ``ROLES`` and a text as its ``content``, which may be absent beside ``tool_calls``.
    Other keys are left to the template. A thought is passed on as transformers does it: the first of
    ``reasoning_content``, ``thinking`` and ``reasoning`` that a message has is its ``reasoning_content``, and its
    ``thinking`` where it has none.

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
        thought = next((plain[key] for key in _THOUGHT if key in plain), None)
        checked.append(plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought})
    return checked


class IncrementalDecoder:
    """Turns ids into text one at a time, in whole characters.

    What ``push`` returns, and ``flush`` at the end, joins to ``tokenizer.decode`` of all ids. The bytes of a character
    are held until it is whole; bytes that cannot become one are U+FFFD at once. Special ids print nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop = tokenizer.drops_space

    def push(self, id: int) -> str:
        """The text that this id completes."""
        return self._text(b"" if id in self.tokenizer.special_ids else self.tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is held when no id follows: U+FFFD for half a character."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._drop and text:
            self._drop = False
            return text.removeprefix(" ")
        return text


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


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
