"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress


def partial_match(text: str, strings: Iterable[str]) -> int:
    """How many characters at the end of ``text`` could be the beginning of one of ``strings``."""
    longest = max((len(string) - 1 for string in strings), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(string) > length and string.startswith(tail) for string in strings):
            return length
    return 0


class StopStrings:
    """Cuts a text before the first stop string, and holds back what could become one.

    The first stop string is the one that is complete first, and the longest of those that are complete with the same
    character, so that no part of any is shown. The cut does not depend on how the text is divided.

    A stop string that holds the text of a control token is looked for in the text as it is shown, and in the text with
    the special tokens written out.

    Args:
        stops: none of them empty, which ``SamplingParams`` checks; an empty sequence stops nothing.
        control_tokens: their texts.
    """

    def __init__(self, stops: Sequence[str], control_tokens: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        control_tokens = tuple(control_tokens) if stops else ()
        self._mixed = tuple(stop for stop in stops if any(text in stop for text in control_tokens))
        self._held = ""
        self._shown: list[bool] = []  # whether a character that is held is one of the text that is shown

    def push(self, text: str, shown: bool = True) -> tuple[str, str | None]:
        """Take the next piece.

        Args:
            shown: False for the text of a special token, which is looked at and never shown.

        Returns:
            What may be shown now, and the stop string that is complete, if one is. Then the text has ended: what came
            after it is dropped, and nothing is held.
        """
        if shown or self._mixed:
            self._held += text
            self._shown += [shown] * len(text)
        places = [place for place, shown in enumerate(self._shown) if shown]
        visible = "".join([self._held[place] for place in places])
        found = [(at + len(stop), at, stop) for stop in self._mixed if (at := self._held.find(stop)) >= 0]
        for stop in self._stops:
            if (at := visible.find(stop)) >= 0:
                found.append((places[at + len(stop) - 1] + 1, places[at], stop))
        if found:
            _, at, stop = min(found)
            text = self._take(at)
            self._take(len(self._held))
            return text, stop
        open_visible, open_mixed = partial_match(visible, self._stops), partial_match(self._held, self._mixed)
        held_from = places[-open_visible] if open_visible else len(self._held)
        return self._take(min(held_from, len(self._held) - open_mixed)), None

    def flush(self) -> str:
        """What is held, when no text follows."""
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        """What is shown of the first characters that are held, which are held no longer."""
        text = "".join(compress(self._held[:length], self._shown))
        self._held, self._shown = self._held[length:], self._shown[length:]
        return text
