"""Options that do nothing (issue 14, 9): the result names each, and says why; the tokens are those without it."""

from __future__ import annotations

from typing import Any

import pytest

from ringkv import RingConfig, SamplingParams
from ringkv.engine.idle import fixed_seeds
from ringkv.engine.text.templates import ChatTemplate
from scripted import OPENING, TEMPLATE, Script, byte_tokenizer

DEAF = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"  # reads no variable
SETS = "{% set enable_thinking = true %}" + TEMPLATE
END = "<|im_end|>"
DRAWN = "at temperature 0 the likeliest token is drawn"
RAW = "no chat template reads it (raw mode, or token ids)"
UNREAD = "the chat template does not read enable_thinking"
UNCLOSED = "only max_thinking_tokens, or on_repetition = 'close_thought', closes a thought"
THOUGHTLESS = "the model has no thought whose tags are single tokens"

CASES: list[tuple[str, dict[str, Any], str | None]] = [  # template, params, why they do nothing
    (TEMPLATE, {"thinking": True}, None),
    (TEMPLATE, {"thinking": False}, None),
    (DEAF, {"thinking": True}, UNREAD),
    (DEAF, {"thinking": False}, UNREAD),
    (SETS, {"thinking": False}, UNREAD),
    (DEAF, {"thinking": "auto"}, None),
    (OPENING, {"thinking_message": "Enough."}, UNCLOSED),
    (OPENING, {"thinking_message": "Enough.", "max_thinking_tokens": 1}, None),
    (OPENING, {"thinking_message": "Enough.", "on_repetition": "close_thought"}, None),
    (DEAF, {"thinking_message": "Enough."}, THOUGHTLESS),
    (DEAF, {"on_repetition": "close_thought"}, f"{THOUGHTLESS}, so a loop ends the text"),
    (DEAF, {"on_repetition": "ignore"}, None),
    (TEMPLATE, {"top_p": 0.5}, DRAWN),
    (TEMPLATE, {"top_k": 3}, DRAWN),
    (TEMPLATE, {"min_p": 0.1}, DRAWN),
    (TEMPLATE, {"top_p": 1}, None),
    (TEMPLATE, {"top_k": 3, "temperature": 0.5}, None),
    (TEMPLATE, {"min_tokens": 3, "ignore_eos": True}, "no token ends the text"),
    (TEMPLATE, {"min_tokens": 3}, None),
]


@pytest.mark.parametrize("template, given, why", CASES)
def test_an_option_that_does_nothing_is_named(template: str, given: dict[str, Any], why: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    engine = Script(lambda _: tokenizer.encode(f"one two{END}"), tokenizer).engine
    base = SamplingParams(temperature=0, max_tokens=9, ignore_eos="ignore_eos" in given)
    done, without = engine.generate("Hi", base.replace(**given)), engine.generate("Hi", base)
    name = next(iter(given))
    wanted = [] if why is None else [f"{name} = {given[name]!r} does nothing: {why}"]
    assert [warning for warning in done.warnings if " does nothing: " in warning] == wanted
    if why is not None:
        assert (done.token_ids, done.text, done.prompt_tokens) == (
            without.token_ids,
            without.text,
            without.prompt_tokens,
        )


@pytest.mark.parametrize(
    "prompt, thinking, idle",
    [
        ("Hi", True, True),
        ("Hi", False, True),
        ("Hi<think>", False, True),
        ("Hi<think>So far", True, False),
        ("Hi<think>", "auto", False),
    ],
)
def test_thinking_in_raw_mode_says_that_the_prompt_opened_a_thought_or_nothing(prompt, thinking, idle):
    script = Script(lambda _: byte_tokenizer().encode(f"one{END}"))
    for one in (prompt, script.ids(prompt)):
        done = script.engine.generate(one, SamplingParams(thinking=thinking), raw=True)
        assert (f"thinking = {thinking} does nothing: {RAW}" in done.warnings) == idle


def test_the_variables_of_a_template_are_those_that_change_its_text() -> None:
    """Rendering with and without is the oracle: a template that does not read a variable writes the same."""
    messages = [{"role": "user", "content": "Hi"}]
    for source in (TEMPLATE, OPENING, DEAF, SETS, "{% macro m() %}{{ enable_thinking }}{% endmacro %}{{ m() }}"):
        template = ChatTemplate(source)
        texts = {template.render(messages, thinking=thinking) for thinking in (None, True, False)}
        assert ("enable_thinking" in template.variables) == (len(texts) > 1)


def test_a_negative_seed_is_fixed_and_named() -> None:
    """Other programs draw a seed for -1."""
    engine = Script(lambda _: byte_tokenizer().encode(END)).engine
    line = "seed = -1 is a fixed seed, as every int is: leave it out to have one drawn"
    assert line in engine.generate("Hi", SamplingParams(seed=-1)).warnings
    assert engine.generate("Hi", SamplingParams(seed=-1)).ring["seed"] == 2**64 - 1
    assert engine.generate("Hi", SamplingParams(seed=0)).warnings == []
    assert fixed_seeds(None, -1) == [line]
    assert fixed_seeds(None, None, 3) == []


MERGING = "{% for m in messages %}{% if loop.first %}<|im_start|>{% endif %}{{ m.content }}\n\n{% endfor %}"
DEMANDING = "{% if messages[-1].role != 'user' %}{{ raise_exception('no question') }}{% endif %}" + TEMPLATE
SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
RULES = "Be brief, and say why. " * 4


@pytest.mark.parametrize(
    "template, first, why",
    [
        (TEMPLATE, "system", None),
        (MERGING, "system", None),
        (DEMANDING, "system", None),
        (TEMPLATE, "developer", None),
        (SILENT, "system", "the chat template does not write it whole"),
        (TEMPLATE, "user", "the prompt has no system message"),
    ],
)
def test_the_system_message_is_pinned_where_the_template_writes_it(template, first, why):
    """Issue 14, 10: in the rendered conversation, whatever stands around it."""
    tokenizer = byte_tokenizer(template)
    engine = Script(
        lambda _: tokenizer.encode(f"one{END}"), tokenizer, ring=RingConfig(200, 8, "streaming", pin="system")
    ).engine
    messages = [{"role": first, "content": RULES}, {"role": "user", "content": "Hi"}]
    done = engine.generate(messages, SamplingParams(max_tokens=4))
    pin = int(engine.ring.pin[0])
    pinned = engine.prompts.texts(engine.prompts.encode(messages)[:pin])[0] if pin else []
    assert (RULES.strip() in "".join(pinned)) == (why is None)
    assert "Hi" not in "".join(pinned)
    assert (pin == 0) == (why is not None)
    left_out = ["the system message does nothing: the chat template does not write it"] if template == SILENT else []
    assert done.warnings == ([] if why is None else [*left_out, f"pin = 'system' does nothing: {why}"])


def test_a_pinned_system_message_that_leaves_nothing_to_evict_is_refused():
    engine = Script(lambda _: [1], ring=RingConfig(40, 8, "streaming", pin="system")).engine
    with pytest.raises(ValueError, match=r"pin = 'system': pinned tokens \(\d+\) \+ window \(8\) = "):
        engine.generate([{"role": "system", "content": RULES}, {"role": "user", "content": "Hi"}])


def test_raw_prompts_have_no_system_message():
    script = Script(lambda _: byte_tokenizer().encode(END), ring=RingConfig(40, 8, "streaming", pin="system"))
    for one in ("Hi", script.ids("Hi")):
        done = script.engine.generate(one, raw=True)
        assert done.warnings == ["pin = 'system' does nothing: the prompt has no system message"]
