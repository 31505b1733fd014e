"""What tells the texts of messages from the control tokens of a chat template, once both are one text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError

# Where guards are taken from: letters that Python and JSON print as they are, and that hardly any text holds.
_RARE = [chr(code) for code in range(0x20000, 0x2A6D7)]
_TRIES = 100


class _Known(NamedTuple):
    """What follows from the texts that only a template writes; the same for every conversation with a model.

    Attributes:
        pattern: finds them, the longest first.
        lower: in small letters.
        heads, tails: how they begin and end, in small letters.
        blanks: whether some hold blanks; those of a text then count.
    """

    pattern: str
    lower: list[str]
    heads: set[str]
    tails: set[str]
    blanks: bool


class Guard:
    """Keeps the texts of messages from being taken for control tokens of the template.

    The guard is a character that nothing else holds. In the texts of messages it stands before the last character of
    whatever reads as a control token, and, where a text could become a part of one beside the template's own text,
    before its first and its last character. So a control token of a rendered text is the template's unless the guard
    stands in it or directly before it. What a template does with a text, it does with the guard as well. If it takes
    characters out (SmolLM3's takes "/think"), the rest could become a control token: where a text holds all characters
    of one in their order, each that could be its last has the guard before it.

    Words that the template names, such as the keys that it looks up, are its own: they stay as they are, and so do
    roles.

    Args:
        control_tokens: ids by text.
        messages: checked.
        texts: further ones that only the template writes, and that are no tokens.

    Attributes:
        mark: another character that nothing holds.
    """

    def __init__(
        self,
        control_tokens: Mapping[str, int],
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        texts: Sequence[str] = (),
    ) -> None:
        self._ids = control_tokens
        surroundings = json.dumps([messages, template.source, *control_tokens, *texts], ensure_ascii=False).replace(
            r"\\", "\\"
        )
        used = set(surroundings)
        unused = islice((letter for letter in _RARE if letter not in used), _TRIES)
        letters = [one for one in unused if not any(form in surroundings for form in _forms(one))]
        if len(letters) < 2:
            raise RingkvError(f"messages: they hold almost all of {len(_RARE)} rare letters; accepted are fewer")
        self._guard, self.mark = letters[:2]
        self._known = known = _known(frozenset((*control_tokens, *texts)))
        self._pattern = re.compile(f"(?<!{self._guard})({known.pattern})")
        # A template may write what a message says in small letters, or in capitals.
        self._any_case = re.compile(self._pattern.pattern, re.IGNORECASE)
        self._all = self._guard.join(known.lower)
        self._names, self._replaces = template.names | {"role"}, template.replaces

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with guards; its role, whose words are known, stays."""
        return {**self._mapped(message), "role": message["role"]}

    def gathered(self, rendered: str) -> str:
        """A rendered text with the guard and the mark as they are, where the template has written them as JSON."""
        for letter in (self._guard, self.mark):
            for form in _forms(letter):
                rendered = rendered.replace(form, letter)
        return rendered

    def removed(self, text: str) -> str:
        """A text without guards."""
        return text.replace(self._guard, "")

    def found(self, text: str) -> list[re.Match[str]]:
        """The control tokens, and the further texts, that the template wrote."""
        return list(self._pattern.finditer(text))

    def parts(self, text: str) -> list[str | int]:
        """The template's control tokens in a text as ids, and the texts between them without guards."""
        pieces = self._pattern.split(text)
        return [self._ids.get(piece, piece) if at % 2 else self.removed(piece) for at, piece in enumerate(pieces)]

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
        while (guarded := self._any_case.sub(self._broken, text)) != text:
            text = guarded
        if self._replaces and (ends := {one[-1] for one in self._known.lower if _in_order(one, text.lower())}):
            text = re.sub(f"(?<!{self._guard})(?i:[{re.escape(''.join(ends))}])", self._broken, text)
        core = text if self._known.blanks else text.strip()  # a template may trim a text
        if name or not core or not self._joins(core.lower()):
            return text
        before, _, after = text.partition(core)
        return f"{before}{self._guard}{core[:-1]}{self._guard}{core[-1]}{after}"

    def _broken(self, found: re.Match[str]) -> str:
        return f"{found[0][:-1]}{self._guard}{found[0][-1]}"

    def _joins(self, core: str) -> bool:
        """Whether a text could be a part of a control token, or end or begin one."""
        known = self._known
        lengths = range(1, 1 + min(len(core), max(map(len, known.lower), default=0)))
        inside = core in self._all
        return inside or any(core[:n] in known.tails or core[-n:] in known.heads for n in lengths)


@lru_cache(maxsize=4)
def _known(texts: frozenset[str]) -> _Known:
    longest = sorted(texts, key=lambda text: (-len(text), text))
    lower = [text.lower() for text in longest]
    return _Known(
        pattern="|".join(map(re.escape, longest)) or "(?!)",
        lower=lower,
        heads={text[:end] for text in lower for end in range(1, len(text))},
        tails={text[start:] for text in lower for start in range(1, len(text))},
        blanks=any(character.isspace() for text in longest for character in text),
    )


def _in_order(characters: str, text: str) -> bool:
    at = 0
    return all(at := text.find(one, at) + 1 for one in characters)


def _forms(character: str) -> tuple[str, ...]:
    """How JSON in ASCII and Python's ascii() write a rare letter."""
    return json.dumps(character)[1:-1], ascii(character)[1:-1]
