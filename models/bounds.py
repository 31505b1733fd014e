"""Bounds of what a tokenizer may ask for: what would make gigabytes of a small file is refused before it is built."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ringkv.errors import RingkvError
from ringkv.models.keys import refusal, short

# Published tokenizers have some thousand added tokens of up to a hundred characters. What tells them from the texts of
# messages takes memory that grows with the square of their length.
MOST_ADDED, LONGEST_ADDED, ADDED_CHARACTERS = 1 << 13, 1 << 8, 1 << 18
MOST_HOLES = 1 << 16  # ids without a token; each takes a name of its own
# How many times as long a normaliser may make a text. A published one makes up to 18 of one character (NFKC), and some
# do so twice, and lower case as well.
MOST_GROWTH = 1 << 12
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 36}
_MOST_FRAME = 1 << 16  # tokens that a post-processor puts around a text


def check_added(texts: Iterable[str], at: str) -> None:
    """Refuse added tokens that are too long or too many.

    Args:
        at: where they stand.
    """
    texts = list(texts)
    if (longest := max(texts, key=len, default="")) and len(longest) > LONGEST_ADDED:
        raise RingkvError(
            f"{at}: {short(longest)} has {len(longest)} characters: accepted are added tokens of up to {LONGEST_ADDED}"
        )
    characters = sum(map(len, texts))
    if len(texts) > MOST_ADDED or characters > ADDED_CHARACTERS:
        raise RingkvError(
            f"{at}: {len(texts)} added tokens of {characters} characters: accepted are up to {MOST_ADDED} of "
            f"{ADDED_CHARACTERS} in all"
        )


def check_tokenizer(description: Mapping[str, Any], at: str) -> None:
    """Refuse a ``tokenizer.json`` that asks for too much. What is wrong with it otherwise, its library says.

    Args:
        at: what errors call the file.
    """
    added = description.get("added_tokens")
    added = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    check_added([text for text in added if isinstance(text, str)], f"{at}: added_tokens")
    if (growth := math.prod(map(_growth, _steps(description.get("normalizer"), "normalizers")))) > MOST_GROWTH:
        raise refusal(f"{at}: growth of a text under its normalizer", growth, f"up to {MOST_GROWTH} times")
    for step in _steps(description.get("post_processor"), "processors"):
        special = step.get("special_tokens") or {}
        ids = [len(one.get("ids") or ()) for one in special.values()]
        if (tokens := len(step.get("single") or ()) * max(ids, default=0)) > _MOST_FRAME:
            raise refusal(f"{at}: tokens that post_processor puts around a text", tokens, f"up to {_MOST_FRAME}")


def _steps(step: Any, inner: str) -> list[dict[str, Any]]:
    """A component and all that are nested in it."""
    if not isinstance(step, dict):
        return []
    return [step, *(one for each in step.get(inner) or () for one in _steps(each, inner))]


def _growth(step: Mapping[str, Any]) -> float:
    """How many characters a step of a normaliser may make of one, at most."""
    kind = step.get("type")
    if kind == "Prepend":
        return 1 + len(step.get("prepend") or "")
    if kind == "Replace":
        text, content = (step.get("pattern") or {}).get("String"), len(step.get("content") or "")
        # A regular expression may match between any two characters.
        return max(1, content / len(text)) if text else 1 + content
    if kind == "Precompiled":  # the length of a table, the table, and the texts that it leads to
        table = base64.b64decode(step.get("precompiled_charsmap") or "")
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    return _GROWTH.get(str(kind), 1)
