"""Loops: a unit of tokens that a model repeats over and over at the end of its text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

LONGEST = 8192  # tokens of the longest unit that is looked for


@dataclass(frozen=True)
class Repetition:
    """A loop: ``unit`` is what is repeated, ``period`` its length, ``count`` how many whole times it stands there."""

    unit: list[int]
    period: int
    count: int


class RepetitionDetector:
    """Says, token by token, when the text has begun to loop.

    A loop is the smallest unit of up to ``LONGEST`` tokens, repeated at least ``min_repeat_count`` whole times,
    adjacent, over at least ``min_repeat_span`` tokens, at the end of the text.

    For every period, the length of the run of tokens that equal the one a period before them is counted on with each
    token, or set to zero. That is one comparison with each of the last ``LONGEST`` tokens, in a few vector operations
    of a fixed size, however long the text is.

    Args:
        min_repeat_count: whole times, at least 3; two equal passages are a quotation, not a loop.
        min_repeat_span: tokens, at least 1. ``SamplingParams`` checks both.
    """

    def __init__(self, min_repeat_count: int = 4, min_repeat_span: int = 512) -> None:
        period = np.arange(1, LONGEST + 1, dtype=np.int64)
        # The first unit of a loop has nothing before it.
        due = period * (np.maximum(min_repeat_count, -(-min_repeat_span // period)) - 1)
        self._due = np.minimum(due, 2**31 - 1).astype(np.int32)
        self._runs = np.zeros(LONGEST, np.int32)
        # The last tokens, the latest first, from self._start on; -1 before the text begins.
        self._tokens, self._start = np.full(2 * LONGEST, -1, np.int32), LONGEST
        self._reported: set[int] = set()  # the periods whose present run was reported
        self.last: Repetition | None = None  # the loop reported last, with the count it has reached by now

    def push(self, token: int) -> Repetition | None:
        """Take the next token; returns a loop with the token that completes it, and None while it goes on."""
        self._runs += 1
        self._runs *= self._tokens[self._start : self._start + LONGEST] == token
        if self._start == 0:
            self._tokens[LONGEST:] = self._tokens[:LONGEST]
            self._start = LONGEST
        self._start -= 1
        self._tokens[self._start] = token
        loops = self._runs >= self._due
        self._reported = {period for period in self._reported if loops[period - 1]}
        if self.last is not None and self.last.period in self._reported:
            self.last = replace(self.last, count=self._count(self.last.period))
        period = int(loops.argmax()) + 1  # the smallest
        if not loops[period - 1] or period in self._reported:
            return None
        self._reported.add(period)
        unit = self._tokens[self._start : self._start + period][::-1].tolist()
        self.last = Repetition(unit, period, self._count(period))
        return self.last

    def _count(self, period: int) -> int:
        return int(self._runs[period - 1]) // period + 1
