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


@dataclass(frozen=True)
class ThoughtTags:
    """What opens and closes a thought.

    Where both tags are single control tokens, only these tokens are tags; the same characters written with other
    tokens, as when a model speaks of tags, are text. Otherwise the characters are the tags.
    """

    open: str = "<think>"
    close: str = "</think>"
    open_id: int | None = None  # both None where one of the tags is no token of its own
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

    def begins_inside(self, ids: Sequence[int], written: Callable[[Sequence[int]], str], claimed: bool = False) -> bool:
        """Whether a prompt without a chat template, a raw text or ids, ends inside a thought.

        Its last tag must be an opening one with nothing but blanks after it: a tag further up may be someone's words.
        One who knows that it is not, and says so, has the last tag count wherever it stands.

        Args:
            written: the text of ids, special ones included.
            claimed: whether the caller says that the prompt ends inside a thought.
        """
        if self.ids is None:
            text = written(ids)
            _, opened, rest = text.rpartition(self.open)
            return bool(opened) and self.close not in rest and (claimed or not rest.strip())
        last = next((at for at in reversed(range(len(ids))) if ids[at] in self.ids), None)
        return last is not None and ids[last] == self.open_id and (claimed or not written(ids[last + 1 :]).strip())


class ThoughtSplitter:
    """Cuts a text into thought and answer as its tokens come, and counts the tokens of each.

    One thought at most: the first opening tag begins it, the first closing tag after that ends it, and any other tag
    is text. A model that opens a thought which its prompt has opened already adds nothing: that tag is a tag.

    Blanks around a thought are not part of it, nor are blank lines between it and the answer (Qwen3's template writes
    both, and takes them away again); so a thought of blanks is empty. The answer is otherwise as it came, blanks before
    an opening tag apart. Without any thought the text is the answer, untouched. A thought that never closes is kept.
    How the text is divided makes no difference.

    Args:
        tags: None where the model has no thoughts: all of the text is the answer.
        inside: whether the prompt ends inside a thought.
    """

    def __init__(self, tags: ThoughtTags | None, inside: bool) -> None:
        self._tags = tags or ThoughtTags()
        self._by_text = tags is not None and tags.ids is None
        self._phase = INSIDE if inside else BEFORE
        self._blank = True  # nothing but blanks in the thought yet
        self._buffer = ""  # text of which it is not known yet what it is
        self._tokens: deque[tuple[int, str, bool]] = deque()  # characters left of a token, its kind so far, if counted
        self._counts = {THINKING: 0, ANSWER: 0, TAG: 0}
        self._parts: deque[tuple[str, str]] = deque()  # text of which it is known, but which may not be shown yet
        self._room = 0  # characters that may be shown
        self._trimmer = _Trimmer(self._tags, self.channel, fresh=tags is not None)

    @property
    def channel(self) -> str:
        """Where the text is now: "thinking" or "answer"."""
        return THINKING if self._phase == INSIDE else ANSWER

    @property
    def phase(self) -> int:
        """BEFORE, INSIDE or AFTER the thought."""
        return self._phase

    @property
    def thinking_tokens(self) -> int:
        """Tokens of the thought without its tags; where tags are texts, known after ``flush``."""
        return self._counts[THINKING]

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer; where tags are texts, known after ``flush``."""
        return self._counts[ANSWER]

    def tag(self, token: int | None) -> str:
        """The text of the tag that this token is, coming now; "" if it is none, and where tags are texts."""
        if self._tags.ids is not None:
            if token == self._tags.open_id and self._phase != AFTER:
                return self._tags.open
            if token == self._tags.close_id and self._phase == INSIDE:
                return self._tags.close
        return ""

    def push(self, token: int | None, text: str, counted: bool = True) -> None:
        """Take a token and what it adds to the text.

        Args:
            token: None for a text alone.
            text: ends with the tag where the token is one, even if the tokenizer prints nothing for it.
            counted: whether the token counts. A token of which any character belongs to a tag counts as a tag.
        """
        tag = self.tag(token)
        if text:
            self._tokens.append((len(text), "", counted))
        else:
            self._counts[TAG if tag else self.channel] += counted
        self._buffer += text
        if self._by_text:
            while (found := self._find()) is not None:
                self._pass(*found)
            self._take(len(self._buffer) - partial_match(self._buffer, self._wanted()))
        elif tag:
            self._pass(len(self._buffer.removesuffix(tag)), tag)
        else:
            self._take(len(self._buffer))

    def show(self, length: int) -> list[tuple[str, str]]:
        """The pieces, ("thinking" or "answer", text), that are complete when so many more characters may be shown."""
        self._room += length
        return self._show()

    def flush(self, length: int = 0) -> list[tuple[str, str]]:
        """The pieces that are left when no text follows, and no more than ``length`` further characters are shown."""
        self._take(len(self._buffer))
        self._room += length
        return self._show(last=True) + self._trimmer.flush()

    def _wanted(self) -> tuple[str, ...]:
        """The tags that may come now."""
        if self._phase == INSIDE:
            return (self._tags.close, self._tags.open) if self._blank else (self._tags.close,)
        return (self._tags.open,) if self._phase == BEFORE else ()

    def _find(self) -> tuple[int, str] | None:
        """Where the next whole tag stands in the buffer, and which."""
        found = [(at, tag) for tag in self._wanted() if (at := self._buffer.find(tag)) >= 0]
        if self._phase == INSIDE:
            found = [(at, tag) for at, tag in found if tag == self._tags.close or not self._buffer[:at].strip()]
        return min(found, default=None)

    def _pass(self, at: int, tag: str) -> None:
        """Go beyond a tag that stands in the buffer."""
        self._take(at)
        self._take(len(tag), TAG)
        self._phase = INSIDE if tag == self._tags.open else AFTER

    def _take(self, length: int, kind: str | None = None) -> None:
        """Say what the first characters of the buffer are, and so of what kind the tokens are that they belong to."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if not text:
            return
        self._blank = self._blank and (kind == TAG or self._phase != INSIDE or text.isspace())
        kind = kind or self.channel
        self._parts.append((kind, text))
        while length:
            left, so_far, counted = self._tokens.popleft()
            so_far = TAG if TAG in (kind, so_far) else so_far or kind
            if left > length:
                self._tokens.appendleft((left - length, so_far, counted))
            else:
                self._counts[so_far] += counted
            length -= min(length, left)

    def _show(self, last: bool = False) -> list[tuple[str, str]]:
        pieces = []
        while self._parts and self._room:
            kind, text = self._parts.popleft()
            if len(text) > self._room:
                if kind == TAG and not last:
                    self._parts.appendleft((kind, text))
                    break
                if kind == TAG and self._by_text:
                    kind = self._trimmer.channel  # half a tag is text, but half the text of a token is nothing
                self._parts.appendleft((kind, text[self._room :]))
                text = text[: self._room]
            self._room -= len(text)
            if piece := self._trimmer.push(kind, text):
                pieces.append((kind, piece))
        return pieces


class _Trimmer:
    """Drops the tags and the blanks around a thought.

    Args:
        channel: where the text begins.
        fresh: False where there is no thought at all, and nothing is to be trimmed.
    """

    def __init__(self, tags: ThoughtTags, channel: str, fresh: bool) -> None:
        self.channel = channel
        self._tags = tags
        self._held = ""  # blanks whose fate is open
        self._fresh = fresh  # only blanks so far in this part
        self._after = False  # whether a thought came before it

    def push(self, kind: str, text: str) -> str:
        """What is to be shown, if anything."""
        if kind == TAG:
            channel = THINKING if text == self._tags.open else ANSWER
            if channel != self.channel:
                self.channel, self._held, self._fresh, self._after = channel, "", True, True
            return ""
        text, self._held = self._held + text, ""
        body = text.lstrip() if self._fresh else text
        if not body:
            self._held = text
            return ""
        if kind == THINKING:
            text = body.rstrip()
            self._held = body[len(text) :]
        elif self._fresh:
            text = self._below(text[: len(text) - len(body)], body)
        self._fresh = False
        return text

    def flush(self) -> list[tuple[str, str]]:
        """The blanks that an answer ends with; those that a thought ends with are dropped."""
        rest, self._held = self._held, ""
        return [(ANSWER, text)] if self.channel == ANSWER and rest and (text := self._below(rest, "")) else []

    def _below(self, blanks: str, body: str) -> str:
        """The beginning of an answer: after a thought, its first line that is not blank, with its indentation."""
        return (blanks[blanks.rfind("\n") + 1 :] if self._after else blanks) + body


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
    splitter.push(None, text)
    return "".join(piece for channel, piece in splitter.flush(len(text)) if channel == ANSWER)
