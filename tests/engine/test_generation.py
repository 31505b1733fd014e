"""Thoughts, stop strings, loops, limits: what a scripted model says, as one who asks for it sees it.

Everything runs with the host in step with the device, and one step behind it: the completions must be the same.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringkv import RingConfig, RingkvError, SamplingParams
from scripted import OPENING, TEMPLATE, Script, byte_tokenizer

END = "<|im_end|>"
A, B = byte_tokenizer().encode("AB")


@pytest.fixture(params=[0, 1], ids=["in step", "one behind"])
def say(request):
    """(text of the model, params, template) -> completion; checks that the stream joins to it."""

    def run(text, params=None, *, template=TEMPLATE, special_tags=False, prompt="Hi"):
        tokenizer = byte_tokenizer(template, special_tags=special_tags)
        script = Script(lambda _: tokenizer.encode(text), tokenizer, latency=request.param)
        params = params or SamplingParams(max_tokens=4000)
        events = list(script.engine.stream(prompt, params))
        done = events[-1].completion
        assert "".join(event.text for event in events if event.channel == "answer") == done.text
        assert "".join(event.text for event in events if event.channel == "thinking") == (done.thinking or "")
        assert [token for event in events for token in event.token_ids] == done.token_ids
        assert all(event.completion is None for event in events[:-1])
        again = script.engine.generate(prompt, params)
        assert (again.text, again.thinking, again.token_ids) == (done.text, done.thinking, done.token_ids)
        return done

    return run


def test_plain_answer(say):
    done = say("Hello, 안녕 👋🏽!" + END)
    assert (done.text, done.thinking) == ("Hello, 안녕 👋🏽!", "")
    assert (done.finish_reason, done.stop_reason) == ("stop", done.token_ids[-1])
    assert done.answer_tokens == done.completion_tokens - 1
    assert done.ring["seen"] == done.prompt_tokens + done.completion_tokens - 1


@pytest.mark.parametrize("special", [False, True], ids=["tags are shown", "tags are special"])
@pytest.mark.parametrize(
    "text, template, thinking, answer, thought_tokens",
    [
        ("I see.</think>Yes." + END, OPENING, "I see.", "Yes.", 6),
        ("<think>I see.</think>Yes." + END, TEMPLATE, "I see.", "Yes.", 6),
        ("\nI see.\n</think>\n\nYes." + END, OPENING, "I see.", "Yes.", 8),
        ("a</think>b</think>c" + END, OPENING, "a", "b</think>c", 1),
        ("x<y and <thin ice" + END, TEMPLATE, "", "x<y and <thin ice", 0),
        ("\n\n</think>\n\nYes." + END, OPENING, "", "Yes.", 2),
    ],
    ids=["template opens", "model opens", "blanks", "closes twice", "never opens", "empty"],
)
def test_thought_and_answer(say, special, text, template, thinking, answer, thought_tokens):
    if special and "closes twice" in text:
        return
    done = say(text, template=template, special_tags=special)
    if special:
        answer = answer.replace("</think>", "")
    assert (done.thinking, done.text, done.thinking_tokens) == (thinking, answer, thought_tokens)
    assert done.finish_reason == "stop"


def test_a_thought_that_never_closes(say):
    done = say("hm, hm, so", SamplingParams(max_tokens=10), template=OPENING)
    assert (done.thinking, done.text) == ("hm, hm, so", "")
    assert (done.finish_reason, done.thinking_tokens, done.answer_tokens) == ("length", 10, 0)
    assert "it ended inside the thought: there is no answer" in done.warnings


SPEAKS = "You think between <think> and it.\n" + TEMPLATE  # a template that names a tag in its system prompt


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, SPEAKS])
@pytest.mark.parametrize("prompt", ["What does <think> mean?", "<think>", "<think>\n", "</think><think>"])
def test_a_question_about_a_thought_is_answered(say, prompt, template, special):
    """What a message or the template says of tags opens no thought; the generation prompt does."""
    done = say(f"A tag.{END}", template=template, special_tags=special, prompt=prompt)
    assert (done.thinking, done.text, done.warnings) == ("", "A tag.", [])
    opened = say(f"hm</think>A tag.{END}", template=template.replace(TEMPLATE, OPENING), prompt=prompt)
    assert (opened.thinking, opened.text) == ("hm", "A tag.")


@pytest.mark.parametrize(
    "prompt, thinking, inside",
    [
        ("What does <think> mean?", "auto", False),
        ("What does <think> mean?", True, True),
        ("Hi\n<think>\n", "auto", True),
        ("Hi\n<think>\nSo far", "auto", False),
        ("Hi\n<think>\nSo far", True, True),
        ("Hi\n<think>\n</think>", True, False),
        ("Hi", True, False),
    ],
)
def test_a_raw_prompt_is_inside_a_thought_where_it_ends_so_or_the_caller_says_so(prompt, thinking, inside):
    """The same for a text and for its ids."""
    script = Script(lambda _: byte_tokenizer().encode(f"hm</think>Yes.{END}"))
    for one in (prompt, script.ids(prompt)):
        done = script.engine.generate(one, SamplingParams(thinking=thinking), raw=True)
        assert (done.thinking, done.text) == (("hm", "Yes.") if inside else ("", "hm</think>Yes."))


@pytest.mark.parametrize(
    "begun, inside",
    [
        ("", True),
        ("hm", True),
        ("hm</think>", False),
        ("hm</think>The tag <think> opens", False),
        ("<think>", True),
    ],
)
def test_what_has_begun_goes_on_where_it_was(begun, inside):
    """An answer that goes on (/continue) is inside a thought by its own tags, after those of the prompt."""
    script = Script(lambda _: byte_tokenizer().encode(f"x{END}"), byte_tokenizer(OPENING))
    done = [*script.engine.stream("Hi", begun=script.ids(begun))][-1].completion
    assert (done.thinking, done.text) == (("x", "") if inside else ("", "x"))


def test_no_thinking_shows_no_thought(say):
    done = say("Yes." + END, SamplingParams(thinking=False), template=OPENING)
    assert (done.thinking, done.text, done.thinking_tokens, done.answer_tokens) == ("", "Yes.", 0, 4)


@pytest.mark.parametrize("budget", [0, 1, 16])
@pytest.mark.parametrize("template, opener", [(OPENING, ""), (TEMPLATE, "<think>")])
@pytest.mark.parametrize("message", ["", " Enough."])
def test_thought_budget(say, budget, template, opener, message):
    """CASES T3: exactly so many tokens of thought, closed with the model's own id; then the model goes on."""
    params = SamplingParams(max_thinking_tokens=budget, thinking_message=message, max_tokens=60)
    done = say(opener + "x" * 200, params, template=template)
    tags = byte_tokenizer().control_tokens
    close = done.token_ids.index(tags["</think>"])
    assert close == len(opener and "1") + budget + len(message)
    assert done.thinking_tokens == budget
    assert done.thinking == ("x" * budget + message).strip()
    assert done.text == "x" * (60 - close - 1)
    assert done.answer_tokens == 60 - close - 1
    assert done.completion_tokens == 60


def test_a_thought_that_closes_itself_is_not_closed_again(say):
    done = say("abc</think>Yes." + END, SamplingParams(max_thinking_tokens=3, max_tokens=50), template=OPENING)
    assert (done.thinking, done.text, done.thinking_tokens) == ("abc", "Yes.", 3)


def test_the_first_limit_wins(say):
    done = say("x" * 50, SamplingParams(max_thinking_tokens=30, max_tokens=7), template=OPENING)
    assert (done.finish_reason, done.thinking_tokens, done.answer_tokens) == ("length", 7, 0)


def test_budgets_of_lanes_end_at_different_steps():
    tokenizer = byte_tokenizer(OPENING)
    engine = Script(lambda _: tokenizer.encode("y" * 99), tokenizer, lanes=3).engine
    budgets = [2, 9, None]
    results = engine.generate(["a", "bb", "c"], [SamplingParams(max_thinking_tokens=n, max_tokens=40) for n in budgets])
    assert [one.thinking_tokens for one in results] == [2, 9, 40]


def test_a_model_without_thoughts_refuses_a_budget():
    tokenizer = byte_tokenizer("{{ messages[0].content }}")
    engine = Script(lambda _: [A], tokenizer).engine
    with pytest.raises(RingkvError, match="max_thinking_tokens = 3: the model has no thoughts"):
        engine.generate("Hi", SamplingParams(max_thinking_tokens=3))
    assert engine.generate("Hi", SamplingParams(max_tokens=2)).thinking is None


@pytest.mark.parametrize(
    "params, message",
    [
        (SamplingParams(thinking_message="x" * 256), "thinking_message: 256 tokens; accepted are up to 255"),
        (SamplingParams(stop_token_ids=[9999]), "stop_token_ids: token id = 9999: accepted is 0 to"),
        (SamplingParams(logit_bias={261: 1.0}), "logit_bias: token id = 261: accepted is 0 to 259"),
        (SamplingParams(logprobs=10**6), "logprobs = 1000000: accepted is 0 to"),
    ],
)
def test_what_a_model_cannot_do_is_refused(params, message):
    engine = Script(lambda _: [A], byte_tokenizer(OPENING)).engine
    with pytest.raises(RingkvError) as error:
        engine.generate("Hi", params)
    assert message in str(error.value)
    assert engine.generate("Hi", SamplingParams(thinking_message="x" * 255, max_tokens=2)).completion_tokens == 2


def test_raw_mode_takes_texts_only():
    engine = Script(lambda _: [A]).engine
    assert engine.generate("<think>", SamplingParams(max_tokens=1), raw=True).prompt_tokens == 1
    assert engine.generate(" ", SamplingParams(max_tokens=1), raw=True).prompt_tokens == 1
    with pytest.raises(RingkvError, match=r"^prompt = ' ': accepted is a text with words$"):
        engine.generate(" ")
    with pytest.raises(RingkvError, match="raw: messages need the chat template"):
        engine.generate([{"role": "user", "content": "Hi"}], raw=True)


def test_earlier_thoughts_are_not_rendered_again():
    engine = Script(lambda _: [A]).engine
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>secret</think>\n\nYes."}]
    ids = engine.prompts.encode([*history, {"role": "user", "content": "<think>mine</think>"}])
    text = "".join(engine.tokenizer.token_bytes(id).decode() for id in ids)
    assert "secret" not in text
    assert "Yes." in text
    assert "<think>mine</think>" in text, "a user's words are left alone"


@pytest.mark.parametrize(
    "stop, text, shown, hit",
    [
        (["END"], "one END two", "one ", "END"),
        (["\n\n", "\n"], "a\n\nb", "a", "\n"),
        ([" stop"], "a stop", "a", " stop"),
        (["👋"], "hi 👋 there", "hi ", "👋"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["zzz"], "zz top", "zz top", None),
    ],
)
def test_stop_strings(say, stop, text, shown, hit):
    done = say(text + END, SamplingParams(stop=stop))
    assert done.text == shown
    assert done.finish_reason == "stop"
    assert done.stop_reason == (hit if hit is not None else done.token_ids[-1])


START = "<|im_start|>"


@pytest.mark.parametrize(
    "stop, text, shown, hit",
    [
        ([START], f"ab{START}cd", "ab", START),
        ([f"b{START}c"], f"ab{START}cd", "a", f"b{START}c"),
        ([f"{START}{START}"], f"a{START}b{START}{START}c", "ab", f"{START}{START}"),
        ([f"b{END}"], "ab", "a", f"b{END}"),  # the model's own ending token completes it
        ([END], "ab", "ab", END),
        (["bc"], f"ab{START}cd", "a", "bc"),  # what is shown holds it
        (["im_start"], f"ab{START}cd", "abcd", None),  # the name of a token is no text
        (["</think>"], "a</think>b", "a", "</think>"),  # a token whose text is shown
        ([f"a{START}"], f"{START}a{END}", "a", None),
        ([f"b{START}é"], f"b{START}éd", "", f"b{START}é"),
    ],
)
def test_stop_strings_with_control_tokens(say, stop, text, shown, hit):
    """Issue 14, 3: they match the text with special tokens written out; the text is shown without them."""
    done = say(text + END, SamplingParams(stop=stop))
    assert (done.text, done.finish_reason) == (shown, "stop")
    assert done.stop_reason == (hit if hit is not None else done.token_ids[-1])


def test_a_stop_string_that_is_a_control_token_ends_as_its_id_does(say):
    """Nor is it drawn before min_tokens, and ignore_eos leaves it in force."""
    done = say(f"a{END}b{END}", SamplingParams(stop=END, ignore_eos=True))
    assert (done.text, done.stop_reason, done.completion_tokens) == ("a", END, 2)
    for params in (SamplingParams(stop=START), SamplingParams(stop_token_ids=byte_tokenizer().encode(START))):
        done = say(f"a{START}b", params.replace(min_tokens=5, max_tokens=5, temperature=0))
        assert byte_tokenizer().encode(START)[0] not in done.token_ids
        assert done.finish_reason == "length"


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "€", "<", START, END, "<think>", "</think>"]), min_size=1, max_size=9),
    stop=st.lists(st.sampled_from(["a", "b", "€", "<", START, END, "</think>"]), min_size=1, max_size=3).map("".join),
    ignore_eos=st.booleans(),
)
def test_a_stop_string_ends_where_the_decoded_tokens_hold_it(pieces, stop, ignore_eos):
    """The tokenizers library decodes ever longer beginnings, with and without special tokens."""
    tokenizer = byte_tokenizer("{{ messages[0].content }}")  # no thoughts
    ids, oracle = tokenizer.encode("".join(pieces)), tokenizer._backend
    engine = Script(lambda _: [*ids, A, A], tokenizer).engine
    done = engine.generate("Hi", SamplingParams(stop=stop, ignore_eos=ignore_eos, max_tokens=len(ids)))
    special = any(token in stop for token in tokenizer.control_tokens)
    for end in range(1, len(ids) + 1):
        shown, written = (oracle.decode(ids[:end], skip_special_tokens=skip) for skip in (True, False))
        if stop in shown or (special and stop in written):
            assert (done.stop_reason, done.token_ids) == (stop, ids[:end])
            before = written[: written.index(stop)] if special and stop in written else shown[: shown.index(stop)]
            assert done.text == before.replace(START, "").replace(END, "")
            return
        if tokenizer.encode(END) == [ids[end - 1]] and not ignore_eos:
            assert (done.stop_reason, done.token_ids, done.text) == (ids[end - 1], ids[:end], shown)
            return
    assert (done.finish_reason, done.text) == ("length", shown)


def test_stop_strings_match_in_the_thought(say):
    done = say("so STOP it</think>Yes.", SamplingParams(stop=["STOP"]), template=OPENING)
    assert (done.thinking, done.text, done.stop_reason) == ("so", "", "STOP")


def test_limits_and_endings(say):
    assert say("abcdef", SamplingParams(max_tokens=3)).text == "abc"
    ignored = say("ab" + END + "cd" + END, SamplingParams(ignore_eos=True, max_tokens=6))
    assert (ignored.text, ignored.finish_reason) == ("abcd", "length")
    by_id = say("abXcd", SamplingParams(stop_token_ids=[byte_tokenizer().encode("X")[0]]))
    assert (by_id.text, by_id.finish_reason) == ("ab", "stop")


def test_min_tokens_holds_the_end_back(say):
    done = say(END * 3 + "ab" + END, SamplingParams(min_tokens=4, max_tokens=9, seed=0))
    end = done.token_ids[-1]
    assert end == byte_tokenizer().encode(END)[0]
    assert end not in done.token_ids[:4]
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("unit", [1, 7, 40, 300])
def test_loops_end_the_text(say, unit):
    """CASES L1."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    piece = "".join(alphabet[(i * i + i // 7) % 36] for i in range(unit)) if unit > 1 else "z"
    done = say("Once: " + piece * 600, SamplingParams(max_tokens=3000))
    assert done.finish_reason == "repetition"
    assert done.repetition["period"] == unit
    assert done.repetition["count"] >= 4
    assert done.repetition["period"] * done.repetition["count"] >= 512 - unit
    assert sorted(done.repetition["unit"]) == sorted(byte_tokenizer().encode(piece))


def test_a_loop_in_a_thought_can_close_it(say):
    """One more token of the model's, then the close id, in step or behind."""
    params = SamplingParams(on_repetition="close_thought", max_tokens=1500, thinking_message="!", min_repeat_span=40)
    done = say("ab" * 30 + "ab" * 2000, params, template=OPENING)
    close = done.token_ids.index(byte_tokenizer().control_tokens["</think>"])
    assert close == 40 + 1 + 1
    assert done.thinking == "ab" * 20 + "a!"
    assert done.thinking_tokens == 41
    assert done.finish_reason == "repetition", "outside the thought a loop ends the text"
    assert done.repetition["period"] == 2


def test_a_loop_can_be_ignored(say):
    done = say("q" * 900, SamplingParams(on_repetition="ignore", max_tokens=700))
    assert (done.finish_reason, done.completion_tokens) == ("length", 700)
    assert done.repetition["period"] == 1


def test_what_is_no_loop(say):
    """CASES L2, with a token a byte: the hardest case."""
    texts = ["-" * 200, "ha" * 100, "".join(f"{i}. step {i * i}\n" for i in range(60))]
    texts.append("".join(f"| {i} | {i * 7 % 10} |\n" for i in range(40)))
    for text in texts:
        assert say(text + END).repetition is None


@pytest.mark.parametrize("latency", [0, 1])
def test_no_step_is_launched_for_nothing_at_max_tokens(latency):
    engine = Script(lambda _: [A], latency=latency).engine
    launch, launched = engine._runner.launch, []
    engine._runner.launch = lambda: (launched.append(1), launch())
    engine.generate("Hi", SamplingParams(max_tokens=9))
    assert len(launched) == 8


@pytest.mark.parametrize("latency", [0, 1])
def test_cancel_while_it_runs(latency):
    script = Script(lambda _: [A], latency=latency)
    events = []
    for event in script.engine.stream("Hi", SamplingParams(max_tokens=100, on_repetition="ignore")):
        events.append(event)
        if len(events) == 5:
            script.engine.cancel(0)
    done = events[-1].completion
    assert (done.finish_reason, done.text) == ("cancelled", "A" * 5)
    assert done.completion_tokens == 5


def test_cancel_while_the_prompt_is_read():
    script = Script(lambda _: [A])
    (event,) = script.engine.stream("Hi", on_prefill=lambda done, layers: script.engine.cancel(0))
    assert event.completion.finish_reason == "cancelled"
    assert event.completion.token_ids == []


def test_ring_figures_are_those_of_the_last_token():
    ring = RingConfig(20, 4, "streaming", "all")
    figures = []
    for latency in (0, 1):
        engine = Script(lambda _: [A, B, B], latency=latency, ring=ring).engine
        done = engine.generate("Hi", SamplingParams(max_tokens=41, on_repetition="ignore"))
        figures.append({key: done.ring[key] for key in ("seen", "kept", "evictions", "peak_slots")})
    assert figures[0] == figures[1]
    assert figures[0]["seen"] == done.prompt_tokens + 40
    assert figures[0]["evictions"] == (figures[0]["seen"] - 20) // 4


def test_logprobs():
    engine = Script(lambda _: [A, B]).engine
    done = engine.generate("Hi", SamplingParams(max_tokens=2, logprobs=2, temperature=5.0, seed=1))
    assert [entry["id"] for entry in done.logprobs] == done.token_ids
    for entry, likely in zip(done.logprobs, (A, B), strict=True):
        assert [len(pair) for pair in entry["top"]] == [2, 2]
        assert entry["top"][0] == [likely, pytest.approx(0.0, abs=1e-6)]
    assert engine.generate("Hi", SamplingParams(max_tokens=2)).logprobs is None


def test_penalties_and_bias_reach_the_model():
    engine = Script(lambda _: [A]).engine
    greedy = SamplingParams(temperature=0, max_tokens=4)
    assert engine.generate("Hi", greedy).text == "AAAA"
    assert engine.generate("Hi", greedy.replace(logit_bias={B: 60})).text == "BBBB"
    text = engine.generate("Hi", greedy.replace(presence_penalty=60)).text
    assert text[0] == "A"
    assert "A" not in text[1:]
    assert engine.generate("Hi", greedy).text == "AAAA", "nothing is left of an earlier request"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text("ab<>/think\n Z", max_size=12), min_size=1, max_size=6),
    tags=st.lists(st.sampled_from(["<think>", "</think>", END]), max_size=5),
    budget=st.none() | st.integers(0, 6),
    stop=st.sampled_from([(), ("Z",), ("ab", "b\n")]),
    min_tokens=st.integers(0, 5),
    on_repetition=st.sampled_from(["stop", "close_thought", "ignore"]),
    template=st.sampled_from([TEMPLATE, OPENING]),
)
def test_one_step_behind_is_the_same(texts, tags, budget, stop, min_tokens, on_repetition, template):
    """Issue 4: a host that reads late gives identical completions."""
    said = "".join(a + b for a, b in zip(texts, [*tags, *[""] * len(texts)], strict=False)) + "ab" * 8 + END
    params = SamplingParams(
        max_tokens=40,
        max_thinking_tokens=budget,
        stop=stop,
        min_tokens=min_tokens,
        thinking_message="!",
        on_repetition=on_repetition,
        min_repeat_count=3,
        min_repeat_span=6,
        temperature=0,
    )
    results = []
    for latency in (0, 1):
        tokenizer = byte_tokenizer(template)
        engine = Script(lambda _, t=tokenizer: t.encode(said), tokenizer, lanes=2, latency=latency).engine
        batch = engine.generate(["Hi", "there", "again"], params)
        results.append([{**one.to_dict(), "timing": None} for one in batch])
    assert results[0] == results[1]
