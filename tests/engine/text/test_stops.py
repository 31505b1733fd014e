"""Stop strings (E3): cut exactly, never shown in part, however the text is divided."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringkv.engine.text.stops import StopStrings, partial_match


def one_shot(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads ever longer beginnings of the text until one ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """What is shown after each piece, and the stop string."""
    holder = StopStrings(stops)
    shown = []
    for piece in pieces:
        visible, hit = holder.push(piece)
        shown.append(visible)
        if hit is not None:
            return [*shown, holder.flush()], hit
    return [*shown, holder.flush()], None


PIECES = st.lists(st.text("ab é\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab é\n", min_size=1, max_size=5), max_size=4)


@given(PIECES, STOPS)
@example(["xab", "cd"], ["abcd", "bc"])
@example(["xabc"], ["bc", "abc"])
@example(["aab"], ["ab"])
def test_joined_stream_is_the_one_shot_cut(pieces, stops):
    shown, hit = stream(pieces, stops)
    assert ("".join(shown), hit) == one_shot("".join(pieces), stops)


@given(PIECES, STOPS)
def test_shows_at_once_all_that_cannot_be_a_stop_string(pieces, stops):
    # As little is held as can be: some text that may follow would make the held part a stop string.
    holder = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        visible, hit = holder.push(piece)
        if hit is not None:
            break
        seen, shown = seen + piece, shown + visible
        held = seen.removeprefix(shown)
        beginnings = [stop[:end] for stop in stops for end in range(1, len(stop))]
        assert len(held) == max((len(start) for start in beginnings if seen.endswith(start)), default=0)


Pieces = list[tuple[str, bool]]  # texts, and whether they are shown
NAMES = ["<a>", "<b>", "é"]


def one_shot_with_names(pieces: Pieces, stops: list[str]) -> tuple[str, str | None]:
    """Reads ever longer beginnings of what is shown and, for stop strings with a name, of what is written out."""
    written = [(character, shown) for text, shown in pieces for character in text]
    for end in range(1, len(written) + 1):
        places = [place for place, (_, shown) in enumerate(written[:end]) if shown]
        text, visible = ("".join(written[place][0] for place in each) for each in (range(end), places))
        starts = {stop: end - len(stop) for stop in stops if text.endswith(stop) and any(n in stop for n in NAMES)}
        if written[end - 1][1]:
            complete = [stop for stop in stops if visible.endswith(stop)]
            starts |= {stop: min(places[-len(stop)], starts.get(stop, end)) for stop in complete}
        if starts:
            stop = min(starts, key=lambda stop: starts[stop])
            return "".join(written[place][0] for place in places if place < starts[stop]), stop
    return "".join(character for character, shown in written if shown), None


PIECE = st.tuples(st.text("abé<>", max_size=3), st.just(True)) | st.tuples(st.sampled_from(NAMES), st.just(False))
PARTS = st.sampled_from([*NAMES, "a", "b", "<", ">", "ab", "é"])


@settings(max_examples=500)
@given(st.lists(PIECE, max_size=10), st.lists(st.lists(PARTS, min_size=1, max_size=3).map("".join), max_size=3))
@example([("a", True), ("<a>", False), ("b", True)], ["ab"])
@example([("a", True), ("<a>", False), ("b", True)], ["a<a>b"])
@example([("ab", True), ("<a>", False)], ["ab", "b<a>"])
@example([("<a", True), (">", True)], ["<a>"])
def test_names_of_special_tokens_are_written_out_for_stop_strings_that_hold_one(pieces, stops):
    holder, shown = StopStrings(stops, NAMES), ""
    hit = None
    for text, visible in pieces:
        piece, hit = holder.push(text, visible)
        shown += piece
        if hit is not None:
            break
    assert (shown + holder.flush(), hit) == one_shot_with_names(pieces, stops)


@pytest.mark.parametrize(
    "pieces,stops,shown,hit",
    [
        (["Hello", " wor", "ld END", " more"], ["END"], "Hello world ", "END"),  # inside one token
        (["Hello E", "N", "D more"], ["END"], "Hello ", "END"),  # over token borders
        (["one", "\n", "\n", "two"], ["\n\n"], "one", "\n\n"),
        (["a stop", "s here"], [" stops"], "a", " stops"),  # with a leading space
        (["fine 👩", "\u200d👩", "\u200d👧 ok"], ["👩\u200d👧"], "fine 👩\u200d", "👩\u200d👧"),  # emoji
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),  # overlapping: complete first
        (["xabc"], ["bc", "abc"], "x", "abc"),  # complete together: the longest
        (["first b then a"], ["a", "b"], "first ", "b"),
        (["", "EN", ""], ["END"], "EN", None),
        (["all of it"], [], "all of it", None),
    ],
)
def test_cuts(pieces, stops, shown, hit):
    assert ("".join(stream(pieces, stops)[0]), stream(pieces, stops)[1]) == (shown, hit)


def test_nothing_is_held_when_nothing_can_match():
    assert StopStrings(["END"]).push("the E") == ("the ", None)
    assert StopStrings(["END"]).push("the Ex") == ("the Ex", None)


def test_a_whole_string_is_no_beginning():
    assert partial_match("x END", ["END", "much longer"]) == 0
    assert partial_match("x EN", ["END", "much longer"]) == 2
