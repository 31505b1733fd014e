"""Thought and answer: which tags divide them, the text as it comes, and the count of tokens."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringkv.engine.text.stops import partial_match
from ringkv.kernels.steer import AFTER, BEFORE, INSIDE

THINKING, ANSWER, TAG = "thinking", "answer", "tag"

KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
_TAIL = 64  # tokens at the end of a prompt that are looked at for a tag of several tokens


@dataclass(frozen=True)
class ThoughtTags:
    """What opens and closes a thought.

    Where both tags are single control tokens, only these tokens are tags; the same characters written with other
    tokens, as when a model speaks of tags, are text. Otherwise the characters are the tags.

    Attributes:
        open, close: their texts.
        open_id, close_id: their tokens; both None where one of them has none of its own.
    """

    open: str = "<think>"
    close: str = "</think>"
    open_id: int | None = None
    close_id: int | None = None

    @property
    def ids(self) -> tuple[int, int] | None:
        """(open, close), or None where the tags are not single tokens."""
        return None if self.open_id is None or self.close_id is None else (self.open_id, self.close_id)

    @classmethod
    def detect(cls, template: str | None, control_tokens: Mapping[str, int]) -> ThoughtTags | None:
        """The tags that a chat template speaks of; without a template those in the vocabulary; else None.

        Args:
            template: its source.
            control_tokens: ids of added tokens by text.
        """
        for open, close in KNOWN_TAGS:
            single = open in control_tokens and close in control_tokens
            if single if template is None else close in template or open in template:
                return cls(open, close, control_tokens[open], control_tokens[close]) if single else cls(open, close)
        return None

    def begins_inside(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Whether a prompt ends inside a thought.

        By tokens: the last tag opens. By text: nothing but blanks follows an opening tag at its very end, for
        a tag further up may be someone's words.
        """
        if self.ids is None:
            return decode(ids[-_TAIL:]).rstrip().endswith(self.open)
        last = next((id for id in reversed(ids) if id in self.ids), None)
        return last == self.open_id


class _Scanner:
    """Cuts a text into thought, answer and tags; blanks are left as they are.

    One thought at most: the first opening tag begins it, the first closing tag after that ends it, and any other tag
    is text. A model that opens a thought which its prompt has opened already adds nothing: that tag is a tag.
    """

    def __init__(self, tags: ThoughtTags, inside: bool) -> None:
        self.phase = INSIDE if inside else BEFORE
        self._tags = tags
        self._buffer = ""
        self._taken = 0  # characters that have left the buffer
        self._marks: deque[tuple[int, str]] = deque()
        self._blank = True  # nothing but blanks in the thought yet

    def mark(self, position: int, tag: str) -> None:
        self._marks.append((position, tag))

    def push(self, text: str, last: bool = False) -> list[tuple[str, str]]:
        """(kind, text) of all that can be told by now; with ``last``, of all that is left."""
        self._buffer += text
        parts: list[tuple[str, str]] = []
        while (found := self._find()) is not None:
            at, tag = found
            self._take(at, parts)
            self._take(len(tag), parts, TAG)
            self.phase = INSIDE if tag == self._tags.open else AFTER
        held = self._held()
        self._take(len(self._buffer) - held, parts)
        if last:  # a marked tag that is not whole was cut by a stop string
            self._take(held, parts, None if self._tags.ids is None else TAG)
        return parts

    def _take(self, length: int, parts: list[tuple[str, str]], kind: str | None = None) -> None:
        if length:
            text, self._buffer = self._buffer[:length], self._buffer[length:]
            self._taken += length
            self._blank = self._blank and (kind == TAG or self.phase != INSIDE or text.isspace())
            parts.append((kind or (THINKING if self.phase == INSIDE else ANSWER), text))

    def _wanted(self) -> tuple[str, ...]:
        if self.phase == BEFORE:
            return (self._tags.open,)
        if self.phase == AFTER:
            return ()
        return (self._tags.close, self._tags.open) if self._blank else (self._tags.close,)

    def _find(self) -> tuple[int, str] | None:
        """The next whole tag in the buffer, and where."""
        if self._tags.ids is not None:
            if self._marks and self._marks[0][0] + len(self._marks[0][1]) <= self._taken + len(self._buffer):
                position, tag = self._marks.popleft()
                return position - self._taken, tag
            return None
        found = [(at, tag) for tag in self._wanted() if (at := self._buffer.find(tag)) >= 0]
        if self.phase == INSIDE:
            found = [(at, tag) for at, tag in found if tag == self._tags.close or not self._buffer[:at].strip()]
        return min(found, default=None)

    def _held(self) -> int:
        """Characters at the end of the buffer that may become a tag."""
        if self._tags.ids is None:
            return partial_match(self._buffer, self._wanted())
        return max(0, self._taken + len(self._buffer) - self._marks[0][0]) if self._marks else 0


class ThoughtSplitter:
    """Thought and answer from a text that comes in pieces, the same for every way of dividing it.

    Blanks around a thought are not part of it, nor are blank lines between it and the answer (Qwen3's template writes
    both, and takes them away again); so a thought of blanks is empty. The answer is otherwise as it came, blanks before
    an opening tag apart. Without any thought the text is the answer, untouched. A thought that never closes is kept.

    Args:
        tags: where they are single tokens, ``mark`` must say where each is.
        inside: whether the prompt ends inside a thought.
    """

    def __init__(self, tags: ThoughtTags, inside: bool) -> None:
        self._tags = tags
        self._scanner = _Scanner(tags, inside)
        self._held = ""  # blanks whose fate is open
        self._channel = THINKING if inside else ANSWER
        self._fresh = True  # only blanks so far in this part
        self._after = False  # whether a thought came before it

    @property
    def inside(self) -> bool:
        """Whether the text up to now ends inside a thought."""
        return self._scanner.phase == INSIDE

    def mark(self, position: int, token: int) -> None:
        """Say that a tag stands at this character of the whole text, before that text is pushed.

        The text must hold the tag itself there, even where the tokenizer prints nothing for its token.
        """
        self._scanner.mark(position, self._tags.open if token == self._tags.open_id else self._tags.close)

    def push(self, text: str) -> list[tuple[str, str]]:
        """The pieces, ("thinking" or "answer", text), that this text completes; none of them empty."""
        return self._trim(self._scanner.push(text))

    def flush(self) -> list[tuple[str, str]]:
        """The pieces that are held when no text follows."""
        pieces = self._trim(self._scanner.push("", last=True))
        rest, self._held = self._held, ""
        if rest and not self.inside and (rest := self._below(rest, "")):
            pieces.append((ANSWER, rest))
        return pieces

    def _trim(self, parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
        pieces = []
        for kind, text in parts:
            if kind == TAG:
                channel = THINKING if text == self._tags.open else ANSWER
                if channel != self._channel:
                    self._channel, self._held, self._fresh, self._after = channel, "", True, True
                continue
            text, self._held = self._held + text, ""
            body = text.lstrip() if self._fresh else text
            if not body:
                self._held = text
                continue
            if kind == THINKING:
                text = body.rstrip()
                self._held = body[len(text) :]
            elif self._fresh:
                text = self._below(text[: len(text) - len(body)], body)
            self._fresh = False
            if text:
                pieces.append((kind, text))
        return pieces

    def _below(self, blanks: str, body: str) -> str:
        """The beginning of an answer: after a thought, its first line that is not blank, with its indentation."""
        return (blanks[blanks.rfind("\n") + 1 :] if self._after else blanks) + body


class ThoughtCounter:
    """Counts the tokens of thought, answer and tags. Forced tokens of a closing message are not given to it.

    Args:
        tags: where they are single tokens, these are counted by their ids alone, as ``kernels.steer`` does. Otherwise
            a token is part of a tag if any of its characters is.
        inside: whether the prompt ends inside a thought.
    """

    def __init__(self, tags: ThoughtTags | None, inside: bool) -> None:
        self._ids = (tags and tags.ids) or (None, None)
        self._by_text = tags is not None and tags.ids is None
        self._scanner = _Scanner(tags or ThoughtTags(), inside)
        self._pending: deque[tuple[int, str | None]] = deque()  # characters left of a token, its kind so far
        self._counts = {THINKING: 0, ANSWER: 0, TAG: 0}

    @property
    def thinking_tokens(self) -> int:
        """Of the thought without its tags; where tags are texts, known after ``flush``."""
        return self._counts[THINKING]

    @property
    def answer_tokens(self) -> int:
        """Of the answer; where tags are texts, known after ``flush``."""
        return self._counts[ANSWER]

    @property
    def inside(self) -> bool:
        """Whether the next token would be part of a thought."""
        return self._scanner.phase == INSIDE

    def push(self, token: int, text: str = "") -> str:
        """Take a token and, where tags are texts, what it adds to the text.

        Returns:
            "tag", "thinking" or "answer"; where tags are texts, the part of the text in which the token was written.
        """
        kind = self._kind(token)
        if self._by_text and text:
            self._pending.append((len(text), None))
            self._assign(self._scanner.push(text))
        else:
            self._counts[kind] += 1
        return kind

    def flush(self) -> None:
        """Settle tokens that might have begun a tag."""
        self._assign(self._scanner.push("", last=True))

    def _kind(self, token: int) -> str:
        opened, closed = (token == id for id in self._ids)
        if opened and self._scanner.phase != AFTER:
            self._scanner.phase = INSIDE
            return TAG
        if closed and self._scanner.phase == INSIDE:
            self._scanner.phase = AFTER
            return TAG
        return THINKING if self.inside else ANSWER

    def _assign(self, parts: list[tuple[str, str]]) -> None:
        for kind, text in parts:
            left = len(text)
            while left:
                length, so_far = self._pending.popleft()
                so_far = TAG if TAG in (kind, so_far) else so_far or kind
                if length > left:
                    self._pending.appendleft((length - left, so_far))
                else:
                    self._counts[so_far] += 1
                left -= min(left, length)


def strip_thought(text: str, tags: ThoughtTags) -> str:
    """The answer in a text that an assistant wrote earlier, for the history of a conversation.

    A thought is what an opening tag begins at the start of the text, or what stands before a closing tag that nothing
    opened, as when the prompt had opened it. Any other text is the answer as it stands.
    """
    opened, closed = text.find(tags.open), text.find(tags.close)
    inside = closed >= 0 and not 0 <= opened < closed
    if not inside and not text.lstrip().startswith(tags.open):
        return text
    splitter = ThoughtSplitter(dataclasses.replace(tags, open_id=None, close_id=None), inside)
    return "".join(piece for channel, piece in splitter.push(text) + splitter.flush() if channel == ANSWER)
