"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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

    Args:
        stops: none of them empty, which ``SamplingParams`` checks; an empty sequence stops nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece.

        Returns:
            What may be shown now, and the stop string that is complete, if one is. Then the text has ended: what came
            after it is dropped, and nothing is held.
        """
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        shown = len(text) - partial_match(text, self._stops)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """What is held, when no text follows."""
        held, self._held = self._held, ""
        return held
