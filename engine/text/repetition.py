"""Loops: a unit of tokens that a model repeats over and over at the end of its text."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass

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
    """The tokens from ``start`` to ``end``, each equal to the one a period before it; a loop from ``due`` on."""

    period: int
    start: int
    end: int
    due: int
    report: Repetition | None = None


class RepetitionDetector:
    """Says, token by token, when the text has begun to loop.

    A loop is the smallest unit repeated at least ``min_repeat_count`` whole times, adjacent, over at least
    ``min_repeat_span`` tokens, at the end of the text. A unit of p tokens is one as soon as the text has kept the
    period p for need(p) = p * max(count, ceil(span / p)) tokens, and it is reported with exactly that token.

    Method. Place n is the end of the first n tokens; its gram is the last g = ceil(span / 6) of them.

    - A period up to g shows as a gram that was seen within the last g places, at the distance where it was seen last.
    - For the longer periods, all other places are numbered. The place of number i, an odd multiple of 2^v, waits for
      its gram to come again until 2^(v+1) more are numbered. When it does, a comparison of hashes tells whether the
      last count - 1 units are equal, and a binary search over hashes where this run of equal units began.
    - From then on each new token is compared with the one a period before it.

    Why no loop is missed. Let a run of smallest period p begin at s. If p <= g, it is found at s + g + p. Otherwise
    consider the p places from A = s + max((count - 2) p, 2 g) on. They are not all in runs of periods up to g, or the
    run itself would have such a period (Fine and Wilf). So m >= 1 of them are numbered, and so are those p places
    later, each with the number m higher. Of the m numbers one is a multiple of 2^v, where 2^v <= m < 2^(v+1), and it
    waits for m more at least. So the run is found before A + 2 p. That is not after s + need(p): need(p) is at least
    count * p, and where (count - 2) p < 2 g it is also at least 2 p + 2 g - 1, for then 3 p or the span is. A multiple
    of a run's period is passed over, for it is never the smallest.

    Cost. A token takes at most two look-ups, and a comparison for each run that it continues. For each v one place
    waits at a time, and the gram of a numbered place comes again after more than g tokens, so hashes are compared
    rarely. A hash of 61 bits only finds a run: before a loop is reported all its tokens are compared, so there is no
    false alarm. The whole text is kept, at 16 bytes a token. ``comparisons`` counts look-ups and compared hashes and
    tokens.

    Args:
        min_repeat_count: whole times, at least 3; two equal passages are a quotation, not a loop.
        min_repeat_span: tokens, at least 1. ``SamplingParams`` checks both.
    """

    def __init__(self, min_repeat_count: int = 4, min_repeat_span: int = 512) -> None:
        self.comparisons = 0
        self._count, self._span = min_repeat_count, min_repeat_span
        self._gram = -(-min_repeat_span // 6)
        self._power = pow(_BASE, self._gram, _MODULUS)
        self._tokens = array("q")
        self._hashes = array("Q", [0])  # of every prefix
        self._recent: dict[int, int] = {}  # gram -> the last place that has it; older places are dropped now and then
        self._numbered = 0
        self._turns: list[tuple[int, int]] = []  # for each v the gram and the place that wait
        self._waiting: dict[int, list[int]] = {}  # gram -> the places that wait for it
        self._runs: list[_Run] = []  # those that the last token continues
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
        if self._runs:
            self._follow(n)
        if n >= self._gram:
            self._look(n)
        return self._report(n) if self._runs else None

    def _follow(self, n: int) -> None:
        """Let the runs go on that the new token continues."""
        self.comparisons += len(self._runs)
        self._runs = [run for run in self._runs if self._tokens[-1] == self._tokens[-1 - run.period]]
        for run in self._runs:
            run.end = n

    def _report(self, n: int) -> Repetition | None:
        """The loop that ends here, if it was not reported before and its tokens prove it."""
        run = min((run for run in self._runs if n >= run.due), key=lambda run: run.period, default=None)
        if run is None or run.report is not None:
            return None
        self.comparisons += n - run.start - run.period
        if self._tokens[run.start : -run.period] != self._tokens[run.start + run.period :]:
            self._runs.remove(run)  # different tokens had an equal hash
            return None
        run.report = Repetition(self._tokens[-run.period :].tolist(), run.period, (n - run.start) // run.period)
        self._last = run
        return run.report

    def _look(self, n: int) -> None:
        """Find the runs that the gram of this place shows."""
        gram = (self._hashes[n] - self._hashes[n - self._gram] * self._power) % _MODULUS
        period = n - self._recent.get(gram, -n)
        self._recent[gram] = n
        if n % self._gram == 0:
            self._recent = {gram: place for gram, place in self._recent.items() if n - place < self._gram}
        if any(run.period <= self._gram for run in self._runs):
            return  # the period shows still
        self.comparisons += 1
        if period <= self._gram:
            self._add(period, n - self._gram - period, n)
            return
        self.comparisons += 1
        for place in self._waiting.get(gram, ()):
            self._try(n - place, n)
        self._wait(gram, n)

    def _try(self, period: int, n: int) -> None:
        """Add the run that has this period, if there is one and it is not known."""
        least = (self._count - 1) * period
        if self._keeps(period, least, n) and all(period % run.period or run.start > n - least for run in self._runs):
            longer = range(least + 1, n + 1)
            more = bisect_left(longer, True, key=lambda length: not self._keeps(period, length, n))
            self._add(period, n - least - more, n)

    def _add(self, period: int, start: int, n: int) -> None:
        need = period * max(self._count, -(-self._span // period))
        self._runs.append(_Run(period, start, n, start + need))

    def _wait(self, gram: int, n: int) -> None:
        """Number a place, and let it wait in the stead of the one whose turn is over."""
        self._numbered += 1
        v = (self._numbered & -self._numbered).bit_length() - 1
        if v == len(self._turns):
            self._turns.append((gram, n))
        else:
            over, place = self._turns[v]
            self._turns[v] = gram, n
            self._waiting[over].remove(place)
            if not self._waiting[over]:
                del self._waiting[over]
        self._waiting.setdefault(gram, []).append(n)

    def _keeps(self, period: int, length: int, n: int) -> bool:
        """Whether the last ``length`` tokens keep a period, by hash."""
        if length > n:
            return False
        self.comparisons += 1
        hashes, start = self._hashes, n - length
        power = pow(_BASE, length - period, _MODULUS)
        return (hashes[n] - hashes[start + period] * power - hashes[n - period] + hashes[start] * power) % _MODULUS == 0
