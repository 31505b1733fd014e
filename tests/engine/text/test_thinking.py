"""Thought and answer (T1, T2, T5): split and counted as on the whole text, however it is divided."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringkv.engine.text.thoughts import (
    ANSWER,
    TAG,
    THINKING,
    ThoughtSplitter,
    ThoughtTags,
    strip_thought,
)

TAGS = ThoughtTags()
SINGLE = ThoughtTags(open_id=1, close_id=2)
Parts = tuple[str, str, bool]  # thought, answer, whether it ends inside the thought


def one_shot(text: str, inside: bool, tags: ThoughtTags = TAGS) -> Parts:
    """The rules of ThoughtSplitter on a whole text, by regular expressions."""
    before = ""
    if not inside:
        before, opened, rest = text.partition(tags.open)
        if not opened:
            return "", text, False
        before = before if before.strip() else ""
        text = rest
    text = re.sub(rf"^(\s*{re.escape(tags.open)})+", "", text)
    thought, closed, answer = text.partition(tags.close)
    # A text before the thought has begun the answer already, but blank lines below the thought are cut all the same.
    return thought.strip(), before + re.sub(r"^\s*\n", "", answer), not closed


def stream(pieces: Sequence[str], inside: bool, tags: ThoughtTags = TAGS) -> Parts:
    splitter = ThoughtSplitter(tags, inside)
    shown = [part for piece in pieces for part in push(splitter, piece)]
    return joined(shown + splitter.flush(), splitter.channel == THINKING)


def push(splitter: ThoughtSplitter, text: str) -> list[tuple[str, str]]:
    splitter.push(7, text)
    return splitter.show(len(text))


def joined(parts: Sequence[tuple[str, str]], inside: bool) -> Parts:
    assert all(channel in (THINKING, ANSWER) and text for channel, text in parts)
    thought, answer = ("".join(text for kind, text in parts if kind == wanted) for wanted in (THINKING, ANSWER))
    return thought, answer, inside


# Whole tags, halves of them, what looks like them, and blanks of all kinds.
WORDS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<",
        "<thin",
        "k>",
        "</th",
        "ink>",
        "/",
        "x<y",
        "a",
        "Hm.",
        " ",
        "\n",
        "\n\n",
        " \t",
        "\u00a0",
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)


@st.composite
def divided(draw: st.DrawFn) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400)
@given(divided(), st.booleans())
@example(["\nHi <think> a </think>\n b"], False)
@example(["<think>\n<th", "ink>a"], False)
def test_joined_stream_is_the_one_shot_split(pieces, inside):
    assert stream(pieces, inside) == one_shot("".join(pieces), inside)


@given(TEXTS, st.booleans())
def test_every_character_alone_is_the_same(text, inside):
    assert stream(list(text), inside) == one_shot(text, inside)


CASES = [
    # (inside, text, thought, answer, ends inside)
    (True, "I see.\n</think>\n\nIt is 4.", "I see.", "It is 4.", False),  # the template opened it
    (True, "\nI see.</think>It is 4.\n", "I see.", "It is 4.\n", False),
    (True, "<think>\nI see.\n</think>\nIt is 4.", "I see.", "It is 4.", False),  # and so did the model, again
    (False, "<think>\nI see.\n</think>\n\nIt is 4.", "I see.", "It is 4.", False),  # the model opens it
    (False, "\n<think>I see.</think>    x = 4", "I see.", "    x = 4", False),
    (False, "<think>a</think> \n\n    x = 4", "a", "    x = 4", False),
    (True, "I see, and go on. ", "I see, and go on.", "", True),  # never closes
    (True, "I see </thin", "I see </thin", "", True),
    (False, "<think>", "", "", True),
    (True, "a</think>b</think>c", "a", "b</think>c", False),  # closes twice
    (True, "a</think>b<think>c</think>d", "a", "b<think>c</think>d", False),
    (False, "\n  It is 4.\n", "", "\n  It is 4.\n", False),  # never opens
    (False, "It is 4.</think>Yes.", "", "It is 4.</think>Yes.", False),
    (False, "x<y and <thin and <", "", "x<y and <thin and <", False),
    (True, "x<y and <thin and </thinner </think>x<y", "x<y and <thin and </thinner", "x<y", False),
    (False, "<think>\n\n</think>\n\nIt is 4.", "", "It is 4.", False),  # T2: an empty thought
    (False, "<think> \n</think>", "", "", False),
    (True, "</think>\n\nIt is 4.", "", "It is 4.", False),
    (False, "", "", "", False),
]


@pytest.mark.parametrize("inside,text,thought,answer,ends_inside", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_cases(inside, text, thought, answer, ends_inside, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert stream(pieces, inside) == (thought, answer, ends_inside)
    assert one_shot(text, inside) == (thought, answer, ends_inside)


def test_shows_text_at_once_and_an_empty_thought_never():
    splitter = ThoughtSplitter(TAGS, inside=False)
    assert push(splitter, "<thi") == []
    assert push(splitter, "nk>\n") == []
    assert push(splitter, "So, ") == [(THINKING, "So,")]
    assert push(splitter, "x<") == [(THINKING, " x")]
    assert push(splitter, "y.\n</think>\n") == [(THINKING, "<y.")]
    assert push(splitter, "\nIt ") == [(ANSWER, "It ")]
    assert push(splitter, "is 4 </think") == [(ANSWER, "is 4 </think")]
    empty = ThoughtSplitter(TAGS, inside=False)
    assert push(empty, "<think>\n\n</think>\n\nIt") == [(ANSWER, "It")]


@pytest.mark.parametrize("open,close", [("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷")])
def test_other_tags(open, close):
    tags = ThoughtTags(open, close)
    assert stream(list(f"{open} a <think> {close}\n b"), False, tags) == ("a <think>", " b", False)


Token = tuple[int, str]  # id, text
TOKENS = st.lists(
    st.one_of(
        st.sampled_from([(1, "<think>"), (2, "</think>")]),
        st.tuples(st.just(7), st.sampled_from(["<think>", "</think>", "a", " ", "\n", "x<y", "</", ""])),
    ),
    max_size=14,
)


def by_token(tokens: Sequence[Token], inside: bool) -> tuple[Parts, list[str]]:
    """The rules for single tokens: the parts of the text, and the kind of each token."""
    kinds = []
    opened, closed = inside, False
    for id, _ in tokens:
        if id == 1 and not closed:
            kinds.append(TAG)
            opened = True
        elif id == 2 and opened and not closed:
            kinds.append(TAG)
            closed = True
        else:
            kinds.append(THINKING if opened and not closed else ANSWER)
    texts = [(kind, text) for kind, (_, text) in zip(kinds, tokens, strict=True)]
    thought = "".join(text for kind, text in texts if kind == THINKING)
    first = next((at for at, kind in enumerate(kinds) if kind != ANSWER), len(kinds))
    before = "".join(text for _, text in texts[:first])
    after = "".join(text for kind, text in texts[first:] if kind == ANSWER)
    if opened and not before.strip():
        before = ""
    return (thought.strip(), before + re.sub(r"^\s*\n", "", after), opened and not closed), kinds


@settings(max_examples=400)
@given(TOKENS, st.booleans(), st.integers(0, 5))
def test_single_tokens_alone_are_tags(tokens, inside, delay):
    # The text comes some characters late, as from a holder of stop strings.
    splitter = ThoughtSplitter(SINGLE, inside)
    length = shown = 0
    kinds, parts = [], []
    for id, text in tokens:
        before = splitter.thinking_tokens, splitter.answer_tokens
        tag = splitter.tag(id)
        splitter.push(id, text)
        after = splitter.thinking_tokens, splitter.answer_tokens
        kinds.append({(1, 0): THINKING, (0, 1): ANSWER, (0, 0): TAG}[after[0] - before[0], after[1] - before[1]])
        assert tag == (text if kinds[-1] == TAG else "")
        length += len(text)
        parts += splitter.show(max(0, length - delay - shown))
        shown = max(shown, length - delay)
    parts += splitter.flush(length - shown)
    expected, expected_kinds = by_token(tokens, inside)
    assert joined(parts, splitter.channel == THINKING) == expected
    assert kinds == expected_kinds
    assert (splitter.thinking_tokens, splitter.answer_tokens) == (kinds.count(THINKING), kinds.count(ANSWER))


def test_half_a_tag_token_is_not_shown():
    # A stop string inside the tag's own text; the tag itself was read.
    splitter = ThoughtSplitter(SINGLE, inside=True)
    splitter.push(7, "So")
    splitter.push(2, "</think>")
    assert splitter.show(3) + splitter.flush(1) == [(THINKING, "So")]
    assert (splitter.channel, splitter.thinking_tokens) == (ANSWER, 1)


def test_half_a_tag_of_text_is_text():
    splitter = ThoughtSplitter(TAGS, inside=True)
    splitter.push(7, "So</think>Yes")
    assert splitter.show(3) == [(THINKING, "So")]
    assert splitter.flush(1) == [(THINKING, "</")]


@given(divided(), st.booleans(), st.integers(0, 60))
def test_a_text_that_is_cut_is_split_like_a_text_that_ends_there(pieces, inside, end):
    # Texts are read further than they are shown, where stop strings hold something back.
    splitter = ThoughtSplitter(TAGS, inside)
    shown, room = [], end
    for piece in pieces:
        splitter.push(7, piece)
        shown += splitter.show(min(room, len(piece)))
        room -= min(room, len(piece))
    channels = joined(shown + splitter.flush(), False)
    assert channels[:2] == one_shot("".join(pieces)[:end], inside)[:2]


def kinds_by_character(text: str, inside: bool) -> list[str]:
    """The kind of every character of a whole text."""
    before, opened, rest = ("", "", text) if inside else text.partition(TAGS.open)
    kinds = [ANSWER] * len(before) + [TAG] * len(opened)
    if not (inside or opened):
        return kinds
    while rest.lstrip().startswith(TAGS.open):
        blanks, tag, rest = rest.partition(TAGS.open)
        kinds += [THINKING] * len(blanks) + [TAG] * len(tag)
    thought, closed, answer = rest.partition(TAGS.close)
    return kinds + [THINKING] * len(thought) + [TAG] * len(closed) + [ANSWER] * len(answer)


@settings(max_examples=400)
@given(divided(), st.booleans())
@example(["foo</", "think", ">bar", "</think>"], True)
def test_counts_by_text(pieces, inside):
    pieces = [piece for piece in pieces if piece]
    splitter = ThoughtSplitter(TAGS, inside)
    for piece in pieces:
        splitter.push(7, piece)
    splitter.flush()
    characters = kinds_by_character("".join(pieces), inside)
    expected = []
    for piece in pieces:
        own, characters = characters[: len(piece)], characters[len(piece) :]
        expected.append(TAG if TAG in own else own[0])
    assert (splitter.thinking_tokens, splitter.answer_tokens) == (expected.count(THINKING), expected.count(ANSWER))


def test_counts_tokens_without_text_and_models_without_tags():
    splitter = ThoughtSplitter(TAGS, inside=True)
    for text in ["", "\u00e9", "</think>", "", "x"]:
        splitter.push(7, text)
    assert (splitter.thinking_tokens, splitter.answer_tokens) == (2, 2)
    plain = ThoughtSplitter(None, inside=False)
    assert [push(plain, text) for text in ["<think>", "", " "]] == [[(ANSWER, "<think>")], [], [(ANSWER, " ")]]
    assert (plain.thinking_tokens, plain.answer_tokens) == (0, 3)


def test_the_message_that_closes_a_thought_does_not_count():
    splitter = ThoughtSplitter(SINGLE, inside=True)
    splitter.push(7, "So")
    splitter.push(8, " enough.", counted=False)
    splitter.push(2, "</think>")
    assert splitter.flush(100) == [(THINKING, "So"), (THINKING, " enough.")]
    assert (splitter.thinking_tokens, splitter.answer_tokens) == (1, 0)


def test_tags_of_which_one_is_a_token_are_texts():
    assert ThoughtTags(open_id=1).ids is None
    assert ThoughtTags(close_id=2).ids is None
    assert ThoughtTags(open_id=0, close_id=2).ids == (0, 2)


CONTROL = {"<think>": 1, "</think>": 2, "[THINK]": 3, "[/THINK]": 4, "<|im_end|>": 5}


@pytest.mark.parametrize(
    "template,control,tags",
    [
        ("...{{ '<think>\\n' }}...", CONTROL, ThoughtTags("<think>", "</think>", 1, 2)),
        ("...content.split('</think>')[-1]...", CONTROL, ThoughtTags("<think>", "</think>", 1, 2)),
        ("...content.split('</think>')[-1]...", {"<think>": 1}, ThoughtTags("<think>", "</think>")),
        ("...[THINK]...[/THINK]...", CONTROL, ThoughtTags("[THINK]", "[/THINK]", 3, 4)),
        ("...<|begin_of_thought|>...", {}, ThoughtTags("<|begin_of_thought|>", "<|end_of_thought|>")),
        ("<|im_start|>assistant", CONTROL, None),
        (None, CONTROL, ThoughtTags("<think>", "</think>", 1, 2)),
        (None, {"[THINK]": 3, "[/THINK]": 4}, ThoughtTags("[THINK]", "[/THINK]", 3, 4)),
        (None, {"<think>": 1}, None),
    ],
)
def test_detects_tags(template, control, tags):
    assert ThoughtTags.detect(template, control) == tags


@pytest.mark.parametrize(
    "prompt,inside,claimed",
    [
        ("Hi<|a|><think>", True, True),
        ("Hi<|a|><think>\n\n", True, True),
        ("Hi<|a|><think>\n\n</think>\n\n", False, False),
        ("Hi<|a|>", False, False),
        ("What does <think> mean?", False, True),  # these might be the words of anybody, unless the caller knows better
        ("Hi<think>\nSo far I", False, True),
        ("Hi<think><|a|>", False, True),
        ("<think>a</think>b<|a|><think>\n", True, True),
        ("<think>a</think>b<|a|>", False, False),
        ("<think>" + "a" * 200, False, True),
        ("", False, False),
    ],
)
def test_raw_prompts_that_end_inside_a_thought(prompt, inside, claimed):
    words = [word for word in re.split(r"(<think>|</think>|(?s:.))", prompt) if word]
    ids = [{"<think>": 1, "</think>": 2}.get(word, 10 + at) for at, word in enumerate(words)]
    texts = dict(zip(ids, words, strict=True))
    written = lambda ids: "".join(texts[id] for id in ids)  # noqa: E731
    for claim, wanted in ((False, inside), (True, claimed)):
        assert SINGLE.begins_inside(ids, written, claim) == wanted
        assert TAGS.begins_inside(list(map(ord, prompt)), lambda ids: "".join(map(chr, ids)), claim) == wanted


@pytest.mark.parametrize(
    "text,answer",
    [
        ("<think>\na\n</think>\n\nb", "b"),
        ("\n<think>a</think>b</think>c", "b</think>c"),
        ("a, and so on.\n</think>\n\nb", "b"),  # the prompt had opened it
        ("<think>\n\n</think>\n\nb", "b"),
        ("<think>it never ended", ""),
        ("b", "b"),
        ("\n b \n", "\n b \n"),
        ("Use <think> and </think> as tags.", "Use <think> and </think> as tags."),
        ("x<y", "x<y"),
        ("", ""),
    ],
)
def test_strips_thoughts_of_earlier_turns(text, answer):
    assert strip_thought(text, TAGS) == answer
    assert strip_thought(text, SINGLE) == answer
