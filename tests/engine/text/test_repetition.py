"""The loop detector against its definition, at every token; what it costs; and texts that are no loops."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv.engine.text.repetition import LONGEST, Repetition, RepetitionDetector
from ringkv.models.checkpoints.open import open_checkpoint

Report = tuple[int, Repetition]  # how many tokens had been read, and what was said


def reports(tokens: Sequence[int], count: int = 4, span: int = 512) -> list[Report]:
    detector = RepetitionDetector(count, span)
    said = [(n, detector.push(token)) for n, token in enumerate(tokens, 1)]
    return [(n, loop) for n, loop in said if loop is not None]


def definition(tokens: Sequence[int], count: int, span: int) -> list[Report]:
    """The brute force: at every token every period; the smallest that makes a loop, when its run is seen first."""
    text = np.array(tokens)
    periods = np.arange(1, len(text) + 1)
    need = periods * np.maximum(count, -(-span // periods))
    kept = np.zeros(len(text), dtype=np.int64)  # how many tokens at the end equal those a period before them
    found: list[Report] = []
    seen = set()
    for n in range(1, len(text) + 1):
        equal = text[n - 1] == text[: n - 1][::-1]
        kept[: n - 1] = np.where(equal, kept[: n - 1] + 1, 0)
        loops = np.flatnonzero(kept[: n - 1] + periods[: n - 1] >= need[: n - 1])
        if not len(loops):
            continue
        period = int(periods[loops[0]])
        length = int(kept[loops[0]]) + period
        if (period, n - length) not in seen:
            seen.add((period, n - length))
            found.append((n, Repetition(list(tokens[n - period : n]), period, length // period)))
    return found


@st.composite
def loopy_texts(draw: st.DrawFn, longest: int = 400) -> list[int]:
    """Units repeated almost, just, and more than often enough, units made of repeated units, pieces in between,
    pieces of pieces again, and such pieces with one token changed."""
    alphabet = draw(st.sampled_from([1, 2, 3, 40]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    text: list[int] = []
    kinds = st.sampled_from(["noise", "unit", "unit", "nested", "again", "changed"])
    for kind in draw(st.lists(kinds, min_size=1, max_size=12)):
        if kind == "noise":
            text += [rng.randrange(alphabet) for _ in range(rng.randrange(1, 20))]
        elif kind in ("unit", "nested"):
            unit = [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 3, 5, 7, rng.randrange(1, 60)]))]
            for _ in range(rng.randrange(1, 4) if kind == "nested" else 0):
                unit = (unit * rng.randrange(1, 5) + unit[: rng.randrange(len(unit) + 1)])[: longest // 4]
                unit += [rng.randrange(alphabet) for _ in range(rng.randrange(2))]
            text += unit * rng.randrange(1, 9) + unit[: rng.randrange(len(unit) + 1)]
        elif text:
            piece = text[-rng.randrange(1, len(text) + 1) :]
            if kind == "changed":
                piece[rng.randrange(len(piece))] = rng.randrange(alphabet)
            text += piece * rng.randrange(1, 5)
            text = text[-longest:]
    return text[:longest]


@settings(max_examples=300, deadline=None)
@given(loopy_texts(), st.sampled_from([3, 4, 5, 8]), st.sampled_from([1, 2, 5, 10, 16, 30, 64, 100]))
def test_equals_the_definition(tokens, count, span):
    assert reports(tokens, count, span) == definition(tokens, count, span)


@settings(max_examples=15, deadline=None)
@given(loopy_texts(3000), st.integers(1, 700), st.integers(0, 2**32))
def test_equals_the_definition_on_long_units_with_the_defaults(prefix, period, seed):
    rng = random.Random(seed)
    unit = [rng.randrange(rng.choice([2, 1000])) for _ in range(period)]
    tokens = prefix + unit * max(4, 600 // period) + prefix[:100]
    assert reports(tokens) == definition(tokens, 4, 512)


@pytest.mark.parametrize("before", [0, 1, 17, 1000, 4099])
@pytest.mark.parametrize("period", [1, 7, 40, 300, 5000])
def test_reports_with_the_token_that_completes_it(period, before):
    # L1, and a long unit.
    rng = random.Random(period + before)
    unit = [rng.randrange(1000, 50000) for _ in range(period)]
    count = max(4, -(-512 // period))
    tokens = [rng.randrange(1000) for _ in range(before)] + unit * count
    assert reports(tokens[:-1]) == []
    assert reports(tokens + unit) == [(len(tokens), Repetition(unit, period, count))]


def test_last_counts_on_while_the_loop_goes_on():
    detector = RepetitionDetector()
    assert detector.last is None
    for token in [9, 8, *[1, 2, 3] * 1000, 1]:
        detector.push(token)
    assert detector.last == Repetition([1, 2, 3], 3, 1000)
    for token in [5, 6, 7, 1, 2, 3, 1, 2, 3]:
        detector.push(token)
    assert detector.last == Repetition([1, 2, 3], 3, 1000)


def test_a_second_loop_is_reported_like_the_first():
    tokens = [1] * 600 + [2, 3] * 300
    assert [(n, loop.period) for n, loop in reports(tokens)] == [(512, 1), (600 + 512, 2)]


def test_a_loop_that_holds_loops_is_reported_when_the_smaller_ends():
    # After the fourth "1 x 512, 2" both 1 and the whole are loops while the 1s last: the smaller unit is meant.
    tokens = ([2] + [1] * 512) * 5
    assert reports(tokens) == definition(tokens, 4, 512)
    assert [loop.period for _, loop in reports(tokens)] == [1, 1, 1, 1, 513, 1]


def test_a_unit_in_which_every_part_stands_twice():
    # The last tokens come again nearer than a unit before them, wherever one is.
    rng = random.Random(7)
    x, y, z = ([rng.randrange(100) for _ in range(400)] for _ in range(3))
    unit = x + y + x + y + x + z + x + z
    for before in (0, 1, 900):
        tokens = [7] * before + unit * 4
        assert reports(tokens) == definition(tokens, 4, 512)
        assert reports(tokens)[-1] == (len(tokens), Repetition(unit, len(unit), 4))


TABLE = "| n | square | cube |\n|---|---|---|\n" + "".join(f"| {n} | {n**2} | {n**3} |\n" for n in range(1, 41))
MATRIX = "\n".join(" ".join(str(int((i * j) % 7 == 1)) for j in range(24)) for i in range(24))
LIST = "".join(f"{n}. Check that item {n} of the list is in its place, and go on.\n" for n in range(1, 81))
CODE = "def reset(state):\n" + "    state.append(0)\n" * 30 + "    return state\n\n\n" + "    x = x + 1\n" * 20
QUIET = {
    "a table of 40 rows": TABLE,
    "200 dashes": "-" * 200 + "\n",
    "a matrix of 0 and 1": MATRIX,
    "ha x 100": 'He laughed: "' + "ha" * 100 + '", and left.',
    "a numbered list": LIST,
    "code with equal lines": CODE,
    "an identity matrix": "\n".join(" ".join(str(int(i == j)) for j in range(20)) for i in range(20)),
}


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint("smollm2").tokenizer()


@pytest.mark.parametrize("name", QUIET)
def test_is_no_loop(name, smollm2):
    text = f"Here it is:\n\n{QUIET[name]}\nThat was it. " + "Now to something else entirely, at last.\n"
    assert reports(smollm2.encode(text)) == []


def test_a_real_loop_of_text_is_one(smollm2):
    sentence = " Wait, let me check that again."
    unit = smollm2.encode(sentence)
    loops = reports(smollm2.encode("So x = 3." + sentence * 100))
    assert [(loop.period, loop.count) for _, loop in loops] == [(len(unit), -(-512 // len(unit)))]
    assert sorted(loops[0][1].unit) == sorted(unit)


N = 100_000


def fibonacci_word() -> list[int]:
    shorter, longer = [0], [0, 1]
    while len(longer) < N:
        shorter, longer = longer, longer + shorter
    return longer


def nearly_periodic() -> list[int]:
    """Units of many lengths, each repeated four times less one token."""
    rng = random.Random(1)
    text: list[int] = []
    while len(text) < N:
        text += ([rng.randrange(9) for _ in range(rng.randrange(1, 4000))] * 4)[:-1]
    return text


def nested() -> list[int]:
    """Threefold repetitions of threefold repetitions: runs on every scale, and no loop."""
    text = [0] * 511
    while len(text) < N:
        text = [*text, len(text)] * 3
    return text


TEXTS = {
    "random": lambda: random.Random(2).choices(range(50000), k=N),
    "random bits": lambda: random.Random(3).choices([0, 1], k=N),
    "one token": lambda: [0] * N,
    "period 40": lambda: list(range(40)) * (N // 40),
    "period 20000": lambda: random.Random(4).sample(range(50000), 20000) * 5,
    "fibonacci": fibonacci_word,
    "thue-morse": lambda: [n.bit_count() % 2 for n in range(N)],
    "a^n b a^n": lambda: [0] * (N // 2) + [1] + [0] * (N // 2),
    "a^511 b": lambda: ([0] * 511 + [1]) * (N // 512 + 1),
    "a^k b": lambda: [token for k in range(450) for token in [0] * k + [1]],
    "nearly periodic": nearly_periodic,
    "nested": nested,
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_token_takes_does_not_grow(name):
    """Every token is compared with the last LONGEST ones, and nothing is kept of the text but these."""
    tokens = TEXTS[name]()[:N]
    detector = RepetitionDetector()
    sizes = set()
    for n, token in enumerate(tokens, 1):
        detector.push(token)
        if n in (N // 10, N):
            sizes.add(tuple(len(value) for value in vars(detector).values() if isinstance(value, np.ndarray)))
    assert sizes == {(LONGEST, LONGEST, 2 * LONGEST)}
    assert len(detector._reported) < 20


@pytest.mark.parametrize("period, found", [(LONGEST, True), (LONGEST + 1, False)])
def test_the_longest_unit(period, found):
    tokens = random.Random(4).sample(range(50000), period) * 4
    assert reports(tokens) == ([(4 * period, Repetition(tokens[:period], period, 4))] if found else [])
