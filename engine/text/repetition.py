"""Loops: a unit of tokens that a model repeats over and over at the end of its text."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import isqrt

from ringkv.errors import RingkvError

_MODULUS = (1 << 61) - 1
_BASE = 0x1F0A2BE71D163FA3


@dataclass(frozen=True)
class Repetition:
    """A loop: ``unit`` is what is repeated, ``period`` its length, ``count`` how many whole times it stands there."""

    unit: list[int]
    period: int
    count: int


@dataclass
class _Run:
    """Text from ``start`` on that keeps a period. It is a loop when it reaches ``due``, if it does."""

    period: int
    start: int
    due: int
    end: int = 0  # of the loop, once it is one
    report: Repetition | None = None


class _Level:
    """Looks for periods up to ``longest``, once in ``every`` tokens.

    Blocks of ``size`` tokens that end 0 .. stride - 1 tokens before the end of the text (baby steps) are compared with
    those that end 1, 2, ... whole strides before it (giant steps): every distance is a difference of two such ends.
    """

    def __init__(self, longest: int) -> None:
        slack = longest // 4
        self.longest = longest
        self.stride = min(isqrt(longest), slack // 4 + 1)
        self.size = longest + self.stride - 1
        self.every = slack - 2 * (self.stride - 1) + 1
        self.power = pow(_BASE, self.size, _MODULUS)
        self.next_look = self.size + 1
        self.run: _Run | None = None


class RepetitionDetector:
    """Says, token by token, when the text has begun to loop.

    A loop is the smallest unit repeated at least ``min_repeat_count`` whole times, adjacent, over at least
    ``min_repeat_span`` tokens, at the end of the text. A unit of p tokens is one as soon as the text has kept the
    period p for need(p) = p * max(count, ceil(span / p)) tokens, and it is reported with exactly that token.

    How: a period is found early and cheaply, and then only awaited. Each level looks for periods up to its own P. At
    every P / 8 or so tokens it seeks the smallest d <= P which the last P + d tokens keep, with the hashes of about
    2 sqrt(P) blocks (baby steps, giant steps). A binary search over hashes tells where the run began, hence when it is
    due; then one hash says whether it is unbroken, and a comparison of all its tokens whether hashes told the truth.

    Why it is exact: levels are spaced so that p + P + P // 4 <= need(p) for every period above those of the level
    below, and a block, its steps and the wait for the next look fit in there: a run is found before it is due. One
    period a level is enough: if d < p <= P are both kept over P tokens and themselves more, d divides p (Fine and
    Wilf), so p is the length of no smallest unit. That takes a count of 3 or more; two equal passages are a quotation,
    not a loop. Different blocks of equal hash (61 bits) raise no false alarm; that they hide a loop has a chance of
    about 2^-40 in a long text.

    What it costs: a level hashes about 2 sqrt(P) blocks in P / 8 tokens and P grows geometrically, so all levels
    together cost a constant a token. A reported loop costs its length once, and one comparison for each token that it
    goes on. ``comparisons`` counts hashed blocks and compared tokens. The whole text is kept, for any period.

    Args:
        min_repeat_count: whole times, at least 3.
        min_repeat_span: tokens, at least 1.

    Raises:
        RingkvError: one of them is not accepted.
    """

    def __init__(self, min_repeat_count: int = 4, min_repeat_span: int = 512) -> None:
        for field, value, least in (("min_repeat_count", min_repeat_count, 3), ("min_repeat_span", min_repeat_span, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RingkvError.bad(field, value, f"an int >= {least}")
        self.comparisons = 0
        self._count, self._span = min_repeat_count, min_repeat_span
        self._tokens = array("q")  # arrays: a long text costs 16 bytes a token
        self._hashes = array("Q", [0])  # of every prefix
        # need(p) - p >= span * (count - 1) / count for any p, so the first level may begin that high.
        first = 4 * min_repeat_span * (min_repeat_count - 1) // (5 * min_repeat_count)
        self._levels = [_Level(max(first, self._longest_above(0)))]
        self._next_event = self._levels[0].next_look
        self._loops: list[_Run] = []
        self._last: _Run | None = None

    @property
    def last(self) -> Repetition | None:
        """The loop reported last, with the count it has reached by now; None if there was none."""
        run = self._last
        if run is None or run.report is None:
            return None
        return Repetition(run.report.unit, run.period, (run.end - run.start) // run.period)

    def push(self, token: int) -> Repetition | None:
        """Take the next token; returns a loop with the token that completes it, and None while it goes on."""
        self._tokens.append(token)
        self._hashes.append((self._hashes[-1] * _BASE + token + 1) % _MODULUS)
        n = len(self._tokens)
        if self._loops:
            self._follow(n)
        if n >= self._next_event:
            self._look(n)
        if not self._loops:
            return None
        run = min(self._loops, key=lambda loop: loop.period)
        if run.report is not None:
            return None
        run.report = Repetition(self._tokens[-run.period :].tolist(), run.period, (n - run.start) // run.period)
        self._last = run
        return run.report

    def _follow(self, n: int) -> None:
        """Let the loops go on that the new token continues."""
        self.comparisons += len(self._loops)
        self._loops = [loop for loop in self._loops if self._tokens[-1] == self._tokens[-1 - loop.period]]
        for loop in self._loops:
            loop.end = n

    def _look(self, n: int) -> None:
        """Whatever is to be done now: a level's look for a period, a run that is due."""
        below = 0
        for level in list(self._levels):
            if n == level.next_look:
                level.next_look += level.every
                if level is self._levels[-1]:
                    self._levels.append(_Level(self._longest_above(level.longest)))
                period = self._find(level, n)
                if period <= below:
                    level.run = None
                elif level.run is None or level.run.period != period:
                    start = n - self._run_length(period, level.size + period, n)
                    level.run = _Run(period, start, start + self._need(period))
            if level.run is not None and n == level.run.due:
                self._settle(level, n)
            below = level.longest
        self._next_event = min(
            event
            for level in self._levels
            for event in (level.next_look, level.run.due if level.run else level.next_look)
            if event > n
        )

    def _settle(self, level: _Level, n: int) -> None:
        """A run is due: a loop, if it is unbroken."""
        run = level.run
        assert run is not None
        length = n - run.start - run.period
        if self._keeps(run.period, length, n):
            self.comparisons += length
            if self._tokens[run.start : n - run.period] == self._tokens[run.start + run.period :]:
                run.end = n
                self._loops.append(run)

    def _find(self, level: _Level, n: int) -> int:
        """The smallest period up to ``longest`` that the last ``size`` tokens and itself more keep, or 0."""
        size, stride, power = level.size, level.stride, level.power
        hashes = self._hashes

        def block(end: int) -> int:
            self.comparisons += 1
            return (hashes[end] - hashes[end - size] * power) % _MODULUS

        babies = {block(n - step): step for step in range(min(stride, n - size + 1))}
        for distance in range(stride, min(level.longest + stride, n - size + 1), stride):
            step = babies.get(block(n - distance))
            if step is not None and distance - step <= level.longest and self._keeps(distance - step, size, n):
                return distance - step
        return 0

    def _run_length(self, period: int, known: int, n: int) -> int:
        """How many tokens up to now keep a period; ``known`` of them do. Not looked for beyond ``need``."""
        high = min(n, self._need(period))
        while known < high:
            middle = (known + high + 1) // 2
            if self._keeps(period, middle - period, n):
                known = middle
            else:
                high = middle - 1
        return known

    def _keeps(self, period: int, length: int, n: int) -> bool:
        """Whether the last ``length`` tokens equal those ``period`` before them, by hash."""
        if n - length - period < 0:
            return False
        self.comparisons += 2
        power = pow(_BASE, length, _MODULUS)
        hashes, back = self._hashes, n - period
        return (hashes[n] - hashes[n - length] * power - hashes[back] + hashes[back - length] * power) % _MODULUS == 0

    def _need(self, period: int) -> int:
        return period * max(self._count, -(-self._span // period))

    def _longest_above(self, below: int) -> int:
        """The largest P with P + P // 4 <= need(p) - p for every p above ``below``."""
        return max(below + 1, 4 * (self._count - 1) * (below + 1) // 5)
