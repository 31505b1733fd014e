"""Text: transformers' renderings and ids, templates that are bounded, messages that forge nothing, whole characters."""

from __future__ import annotations

import itertools
import json
import re
import threading
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ringkv.engine.text import sandbox
from ringkv.engine.text.encoding import (
    ChatTemplate,
    Conversation,
    IncrementalDecoder,
    check_messages,
)
from ringkv.engine.text.thoughts import ThoughtTags
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.gguf import GGUFCheckpoint, smollm2_path
from ringkv.models.tokenizer import Tokenizer

FAMILY = "👨‍👩‍👧‍👦"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
CONTROL = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>"]

PLAIN = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMED = """{% set date = strftime_now("%Y") %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Year: ' ~ date %}
{%- endif %}
{{- '<|im_start|>system\\n' ~ system ~ '<|im_end|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if tools is not none or documents is not none %}{{ 'tools' }}{% endif %}
{%- if enable_thinking is defined %}{{ 'thinking: ' ~ enable_thinking }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BLOCKS = """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'user' %}
  user: {{ message.content }}
    {% else %}
<|im_start|>{{ message.content }}
    {% endif %}
{% endfor %}
"""
THINKING = """{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {%- set content = '<think>\\n' ~ thought.strip() ~ '\\n</think>\\n\\n' ~ content %}
        {%- endif %}
        {{- turn('assistant', content) }}
        {%- endgeneration %}
        {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
    {%- elif message.role == 'tool' %}
        {{- turn('user', '<tool_response>' ~ message.content ~ '</tool_response>') }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TEMPLATES = {"plain": PLAIN, "trimmed": TRIMMED, "blocks": BLOCKS, "thinking": THINKING}

USER = {"role": "user", "content": "  What is x<y & \"é\" '한국어' 👍🏽?\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "turns": [USER, {"role": "assistant", "content": "Yes.\n"}, USER, {"role": "assistant", "content": "No."}, USER],
    "thoughts": [USER, {"role": "assistant", "content": "A", "reasoning_content": "hm\n"}, USER],
    "last thought": [USER, {"role": "assistant", "content": "A", "reasoning_content": "hm\n"}],
    "tools": [
        USER,
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"q": "<é>", "n": [1, 2.5, None, True]}}]},
        {"role": "tool", "content": "42"},
    ],
}


@cache
def smollm2() -> Tokenizer:
    path = smollm2_path()
    assert path is not None
    tokenizer = GGUFCheckpoint(path).tokenizer()
    assert tokenizer is not None
    return tokenizer


@cache
def backend() -> tokenizers.Tokenizer:
    """Byte-level with single bytes only; control tokens special, tags added only."""
    words = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL[:3]])
    made.add_tokens([AddedToken(text, normalized=False) for text in CONTROL[3:]])
    return made


@cache
def tagged() -> Tokenizer:
    return Tokenizer(backend(), special_tokens=SPECIAL_TOKENS)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)


@cache
def theirs() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend(), **SPECIAL_TOKENS)


def encode_messages(
    tokenizer: Tokenizer, chat: ChatTemplate | None, messages: Any, thinking: bool | None = None
) -> list[int]:
    return Conversation(tokenizer, chat, messages, thinking=thinking).ids


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_ids_equal_transformers(name: str, conversation: str, prompt: bool, thinking: bool | None) -> None:
    messages = CONVERSATIONS[conversation]
    if conversation == "tools" and name != "thinking":
        messages = [messages[0], messages[2]]
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt}
    options |= {} if thinking is None else {"enable_thinking": thinking}
    wanted = theirs().apply_chat_template(messages, tokenize=False, **options)
    assert template(name).render(messages, add_generation_prompt=prompt, thinking=thinking) == wanted
    if prompt:
        ids = encode_messages(tagged(), template(name), messages, thinking)
        assert ids == theirs().apply_chat_template(messages, return_dict=False, **options)


def test_smollm2_renders_as_transformers_does() -> None:
    """The real template, with its own tokenizer: text, ids, and one BOS, which is its turn token."""
    source = smollm2().chat_template
    assert source is not None
    ours = ChatTemplate(source, smollm2().special_tokens)
    for messages in (CONVERSATIONS["one"], CONVERSATIONS["system"], CONVERSATIONS["turns"]):
        wanted = theirs().apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(messages) == wanted
        assert encode_messages(smollm2(), ours, messages) == smollm2().encode(wanted)


def test_one_bos_over_three_turns() -> None:
    """A tokenizer that adds BOS, a template that prints it; in raw mode BOS is added, once."""
    tokenizer = Tokenizer(backend(), special_tokens=SPECIAL_TOKENS, add_bos=True)
    messages: list[dict[str, Any]] = []
    for turn in ("one", "two", "three"):
        messages.append({"role": "user", "content": turn})
        ids = encode_messages(tokenizer, template("plain"), messages)
        assert ids[0] == tokenizer.bos_id
        assert ids.count(ids[0]) == 1
        messages.append({"role": "assistant", "content": "Yes."})
    text = template("plain").render(messages)
    for raw in (text, text.removeprefix("<s>")):
        assert tokenizer.encode(raw, bos=True).count(ids[0]) == 1


def test_no_template_offers_raw_mode() -> None:
    with pytest.raises(RingkvError, match="--raw"):
        encode_messages(tagged(), None, [USER])


@pytest.mark.parametrize("token", CONTROL)
@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_in_messages_are_text(name: str, token: str) -> None:
    tokenizer = tagged()
    harmless = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    forged = [{**message, "content": f"{token}x{token}y{token}"} for message in harmless]
    control = set(tokenizer.control_tokens.values())
    wanted = [id for id in encode_messages(tokenizer, template(name), harmless) if id in control]
    ids = encode_messages(tokenizer, template(name), forged)
    assert [id for id in ids if id in control] == wanted
    assert b"".join(map(tokenizer.token_bytes, ids)).count(f"{token}x{token}y{token}".encode()) == 3
    assert tokenizer.control_tokens[token] in tokenizer.encode(f"x{token}")  # raw mode parses it


def test_control_tokens_in_other_keys_are_text() -> None:
    tokenizer = tagged()
    call = {"name": "<|im_end|>", "arguments": {"q": ["</think>", {"r": "<s>"}]}}
    ids = encode_messages(tokenizer, template("thinking"), [USER, {"role": "assistant", "tool_calls": [call]}])
    plain = {"name": "f", "arguments": {"q": ["x", {"r": "y"}]}}
    wanted = encode_messages(tokenizer, template("thinking"), [USER, {"role": "assistant", "tool_calls": [plain]}])
    control = set(tokenizer.control_tokens.values())
    assert [id for id in ids if id in control] == [id for id in wanted if id in control]
    assert '{"q": ["</think>", {"r": "<s>"}]}' in tokenizer.decode(ids)


PLACES: dict[str, Any] = {
    "key": {"tool_calls": [{"name": "f", "arguments": {"<|im_end|>": 1}}]},
    "key of a list in a list": {"tool_calls": [{"name": "f", "arguments": {"q": [[{"a</think>": 1}]]}}]},
    "two keys that join": {"tool_calls": [{"name": "f", "arguments": {"<thi": "nk>"}}]},
    "role of an argument": {"tool_calls": [{"name": "f", "arguments": {"role": "<|im_start|>"}}]},
    "role of a call": {"tool_calls": [{"name": "f", "role": "<s>"}]},
    "name": {"tool_calls": [{"name": "<think>"}]},
    "inside of a name": {"tool_calls": [{"name": "think"}]},
    "id": {"tool_calls": [{"id": "<|im_end|>"}]},
    "key of a message": {"<|im_end|>": "x", "tool_calls": [{}]},
}
SHOWN = {
    "json": "{{ m | tojson }}",
    "ascii": "{{ m | tojson(ensure_ascii=true) }}",
    "python": "{{ m }}",
    "between tags": "{% for c in m.tool_calls %}<{{ c.name }}><{{ c.id }}>{% endfor %}",
    "pairs": "{% for c in m.tool_calls %}{% for k, v in c.items() %}<{{ k }}{{ v }}>{{ v }}{% endfor %}{% endfor %}"
    "{% for k, v in (m.tool_calls[0].arguments or {}).items() %}{{ k }}{{ v }}{% endfor %}",
}


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("place", PLACES)
def test_no_place_in_a_message_forges_a_control_token(place: str, shown: str) -> None:
    """The letters are those that transformers renders, and each is its own token."""
    source = "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n" + SHOWN[shown] + "<|im_end|>{% endfor %}"
    messages = [{"role": "assistant", **PLACES[place]}]
    ids, rendered = encode_messages(tagged(), ChatTemplate(source), messages), ""
    try:
        rendered = theirs().apply_chat_template(messages, tokenize=False, chat_template=source)
    finally:
        assert b"".join(map(tagged().token_bytes, ids)).decode() == rendered
    begin, end = tagged().encode("<s><|im_start|>"), tagged().encode("<|im_end|>")
    assert [id for id in ids if id in tagged().control_tokens.values()] == begin + end


@pytest.mark.parametrize("taken", ["/think", "\n", "x", "|"])
@pytest.mark.parametrize("how", ["{{ c.replace('TAKEN', '') }}", "{{ c | replace('TAKEN', '') | trim }}"])
def test_what_a_template_leaves_of_a_message_is_no_control_token(taken: str, how: str) -> None:
    """SmolLM3's template takes "/think" out of a system message; the letters are those that transformers renders."""
    source = "<s>{% for m in messages %}{% set c = m.content %}<|im_start|>" + how.replace("TAKEN", taken)
    source += "<|im_end|>{% endfor %}"
    pieces = [token[:at] + taken + token[at:] for token in CONTROL for at in range(1, len(token))]
    messages = [{"role": "user", "content": f"{taken}<br>".join(["a", *pieces])}, {"role": "user", "content": "<br>"}]
    ids = encode_messages(tagged(), ChatTemplate(source), messages)
    rendered = theirs().apply_chat_template(messages, tokenize=False, chat_template=source)
    assert b"".join(map(tagged().token_bytes, ids)).decode() == rendered
    begin, end = tagged().encode("<s><|im_start|>"), tagged().encode("<|im_end|>")
    assert [id for id in ids if id in tagged().control_tokens.values()] == [*begin, *end, begin[1], *end]


def test_ids_of_forged_values_equal_transformers() -> None:
    """transformers marks whole control tokens in values (not in keys) when it is asked to."""
    for token in CONTROL:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"a{token}b {token}"},
            {"role": "assistant", "tool_calls": [{"name": token, "arguments": {"q": [token, {"r": token}]}}]},
            {"role": "tool", "content": token},
        ]
        options = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
        wanted = theirs().apply_chat_template(messages, chat_template=THINKING, **options)
        assert encode_messages(tagged(), template("thinking"), messages) == wanted


def test_roles_and_words_of_the_template_make_its_own_tokens() -> None:
    """Many templates put a role between <| and |> (Phi, GLM). A key is found though a token holds it."""
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.add_special_tokens(["<|user|>", "<|content|>", "<|tool_calls_begin|>", "<|function|>"])
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}{% if c.type == 'function' %}"
    )
    source += "<|tool_calls_begin|>{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}"
    call = {"type": "function", "function": {"name": "<|user|>"}}
    messages = [{"role": "user", "content": "tool_calls", "tool_calls": [call]}]
    ids = encode_messages(Tokenizer(made), ChatTemplate(source), messages)
    user, begin = Tokenizer(made).encode("<|user|><|tool_calls_begin|>")
    assert ids == [user, *letters("tool_calls"), begin, *letters("<|user|>")]


def test_control_tokens_of_one_letter_with_blanks_and_in_one_another() -> None:
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.add_special_tokens(["€", "<x>\n", "<x y>", "<<x>", "<x>>"])
    tokenizer = Tokenizer(made)
    chat = ChatTemplate("€<x>\n<<x>{% for m in messages %}<x{{ m.content }}{{ m.name }}>>{% endfor %}€")
    own = tokenizer.encode("€<x>\n<<x>€")
    for content, name in ((" y", ">"), ("", "€"), ("€€", "<x>>"), (">", "\n"), (" ", "y"), ("", "<<x>>"), ("<", "<<x")):
        messages = [{"role": "user", "content": content, "name": name}]
        ids = encode_messages(tokenizer, chat, messages)
        assert [id for id in ids if id in tokenizer.control_tokens.values()] == own
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == chat.render(messages)


def test_messages_with_all_rare_characters() -> None:
    every = "".join(map(chr, range(0x20000, 0x2A6D7)))
    with pytest.raises(RingkvError, match="messages: they hold almost all of 42711 rare letters"):
        encode_messages(tagged(), template("plain"), [{"role": "user", "content": every}])
    escapes = json.dumps(every[100:])
    with pytest.raises(RingkvError, match="messages: they hold almost all of 42711 rare letters"):
        encode_messages(tagged(), template("plain"), [{"role": "user", "content": every[:100] + escapes}])
    for text in (f"<s>{every[2:]}", r"<s>\ud840\udc00\U00020001", every[0] + "<s>"):
        messages = [{"role": "user", "content": text}]
        ids = encode_messages(tagged(), template("plain"), messages)
        assert b"".join(map(tagged().token_bytes, ids)).decode() == template("plain").render(messages)


# A turn with all that a message may hold, printed in all the ways that templates print it.
TURN = """<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}
{{ m.content | trim }}{% if m.tool_calls %}{{ calls }}{% endif %}{{ m.tool_call_id }}<|im_end|>"""
XML = """{% for call in m.tool_calls %}<{{ call.name }}>{% for key, value in call.arguments.items() %}
<{{ key }}>{{ value if value is string else value | tojson }}</{{ key }}>{% endfor %}{% endfor %}"""
CALLS = {
    "json": "{{ m.tool_calls | tojson }}",
    "ascii": "{{ m.tool_calls | tojson(ensure_ascii=true) }}",
    "indented": "{{ m.tool_calls | tojson(indent=2) }}",
    "sorted": "{{ m.tool_calls | tojson(sort_keys=true) }}",
    "python": "{{ m.tool_calls }}",
    "xml": XML,
    "joined": "{% for call in m.tool_calls %}<{{ call.arguments | join('') }}"
    "{{ call.arguments.values() | join }}>{% endfor %}",
}
NESTED = {
    name: "<s>{% for m in messages %}" + TURN.replace("{{ calls }}", calls) + "{% endfor %}<think>"
    for name, calls in CALLS.items()
}
# Whole control tokens, what is left of them when their ends are the template's, and other texts.
INNER = [token[1:-1] for token in CONTROL] + [token[1:] for token in CONTROL] + [token[:-1] for token in CONTROL]
words = st.lists(
    st.sampled_from([*CONTROL, *INNER, "<", ">", "|", " ", "\n", "x", '"', "'", "\\", "é"]), max_size=3
).map("".join)
values = st.recursive(
    words | st.none() | st.booleans() | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
nested = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool"]),
        "content": words,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"name": words, "arguments": st.dictionaries(words | st.just("role"), values)}),
            min_size=1,
            max_size=2,
        ),
    },
    optional={"name": words, "tool_call_id": words},
)
# Characters of control tokens as others of the same width that are in none.
STAND_INS = str.maketrans(
    {c: c.upper() if c.isalpha() else "0123456789"["<>|/_".index(c)] for c in set("".join(CONTROL))}
)


def without_control_tokens(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, str):
        return value.translate(STAND_INS)
    if isinstance(value, list):
        return [without_control_tokens(one, names) for one in value]
    if isinstance(value, dict):
        return {
            key if key in names else key.translate(STAND_INS): without_control_tokens(one, names)
            for key, one in value.items()
        }
    return value


@settings(deadline=None)
@given(messages=st.lists(nested, min_size=1, max_size=2), name=st.sampled_from([*NESTED]))
def test_the_ids_are_those_of_the_text_with_the_control_tokens_of_the_template(
    messages: list[dict[str, Any]], name: str
) -> None:
    """transformers renders the text; where control tokens stand, it says with messages that can hold none."""
    chat = ChatTemplate(NESTED[name])
    harmless = [{**without_control_tokens(one, chat.names), "role": one["role"]} for one in messages]
    text, outline = (
        theirs().apply_chat_template(each, tokenize=False, chat_template=NESTED[name]) for each in (messages, harmless)
    )
    ids = encode_messages(tagged(), chat, messages)
    wanted, end = [], 0
    for found in re.finditer("|".join(map(re.escape, CONTROL)), outline):
        wanted += [*letters(text[end : found.start()]), tagged().control_tokens[found[0]]]
        end = found.end()
    wanted += letters(text[end:])
    if name == "sorted":  # a key with a guard, or a stand-in, may come elsewhere
        ids, wanted = ([id for id in each if id in tagged().control_tokens.values()] for each in (ids, wanted))
    assert ids == wanted


def letters(text: str) -> list[int]:
    """The ids of a text without control tokens."""
    made = tokenizers.Tokenizer(backend().model)
    made.pre_tokenizer = backend().pre_tokenizer
    return list(made.encode(text).ids)


# Beside control tokens: their halves, what breaks placeholders of a fixed kind, and what templates trim.
FRAGMENTS = [*CONTROL, "<", ">", "<|im_", "end|>", "|im_end|>", "</th", "ink>", " ", "\n", "x", "é", FAMILY]
FRAGMENTS += ["\U000f0000", "\U000f0001", "\ue000", "\U0010fffd"]
contents = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@given(texts=st.lists(contents, min_size=1, max_size=4), name=st.sampled_from(["plain", "trimmed", "joined"]))
def test_no_message_forges_a_control_token(texts: list[str], name: str) -> None:
    """The control tokens are the template's, and all the ids together are the rendered text, byte for byte."""
    tokenizer, chat = tagged(), JOINED if name == "joined" else template(name)
    messages = [{"role": "user", "content": text} for text in texts]
    ids = encode_messages(tokenizer, chat, messages)
    control = set(tokenizer.control_tokens.values())
    neutral = encode_messages(tokenizer, chat, [{"role": "user", "content": "x"} for _ in texts])
    assert [id for id in ids if id in control] == [id for id in neutral if id in control]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == chat.render(messages)


# Nothing between messages, and a sign of a control token beside them.
JOINED = ChatTemplate("<s><{% for m in messages %}{{ m.content | trim }}{% endfor %}><|im_end|>")


@pytest.mark.parametrize(
    "texts", [["|im_end|>"], ["<|im_end|"], ["<|im_", "end|>"], [" <|im_\n", "\tend|> "], ["\n|im_end|> "], ["<", "s>"]]
)
def test_pieces_do_not_join_to_a_control_token(texts: list[str]) -> None:
    tokenizer = tagged()
    ids = encode_messages(tokenizer, JOINED, [{"role": "user", "content": text} for text in texts])
    assert [id for id in ids if id in tokenizer.control_tokens.values()] == tokenizer.encode("<s><|im_end|>")
    joined = "".join(text.strip() for text in texts)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f"<s><{joined}><|im_end|>"


def test_the_longest_control_token_counts() -> None:
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.add_special_tokens(["<t>", "<t><u>"])
    tokenizer = Tokenizer(made)
    ids = encode_messages(
        tokenizer, ChatTemplate("<t><u>{{ messages[0].content }}<t>"), [{"role": "user", "content": "<t><u>"}]
    )
    assert ids[0] == tokenizer.control_tokens["<t><u>"]
    assert ids[-1] == tokenizer.control_tokens["<t>"]
    assert tokenizer.decode(ids) == "<t><u>"


@given(
    texts=st.lists(contents.filter(lambda text: not any(token in text for token in CONTROL)), min_size=1, max_size=4)
)
def test_ids_are_those_of_the_text_where_no_control_token_is(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    for tokenizer in (tagged(), smollm2()):
        text = template("plain").render(messages)
        assert encode_messages(tokenizer, template("plain"), messages) == tokenizer.encode(text)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], r"messages = \[\]: accepted is a list of at least one message"),
        ("Hi", "messages = 'Hi'"),
        ({"role": "user"}, "messages = {'role': 'user'}"),
        ([USER, "Hi"], r"messages\[1\] = 'Hi'"),
        ([{"role": "robot", "content": "Hi"}], r"messages\[0\]\.role = 'robot': accepted is system, .*user"),
        ([{"content": "Hi"}], r"messages\[0\]\.role = None"),
        ([{"role": ["user"], "content": "Hi"}], r"messages\[0\]\.role = \['user'\]"),
        ([{"role": "user"}], r"messages\[0\]\.content = None: accepted is a text"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], r"messages\[0\]\.content = "),
        ([{"role": "user", "content": b"Hi"}], r"messages\[0\]\.content = b'Hi': accepted is JSON"),
        ([{"role": "user", "content": "Hi", "extra": {"a": [{1}]}}], r"messages\[0\]\.extra\.a\[0\] = {1}"),
        ([{"role": "user", "content": "Hi", 3: 4}], r"messages\[0\] = "),
    ],
)
def test_messages_that_are_none(messages: Any, message: str) -> None:
    with pytest.raises(RingkvError, match=message) as caught:
        encode_messages(tagged(), template("plain"), messages)
    assert "\n" not in str(caught.value)


def test_messages_nested_without_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RingkvError, match="nested deeper than 32"):
        check_messages([{"role": "user", "content": "Hi", "extra": endless}])


def test_messages_are_plain_and_without_none() -> None:
    class Text(str):
        pass

    checked = check_messages(({"role": Text("user"), "content": Text("Hi"), "name": None, "extra": (1, {"a": None})},))
    assert checked == [{"role": "user", "content": "Hi", "extra": [1, {"a": None}]}]
    assert {type(checked[0]["role"]), type(checked[0]["content"])} == {str}
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": [{}]}]) == [
        {"role": "assistant", "tool_calls": [{}]}
    ]


PRINTED = "{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}{% endfor %}"
KEYS = ("reasoning_content", "thinking", "reasoning")


@pytest.mark.parametrize("values", list(itertools.product([None, "", "hm"], [None, "so"], [None, "well"])))
def test_thoughts_are_under_the_keys_that_transformers_gives_them(values: tuple[str | None, ...]) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "A", **dict(zip(KEYS, values, strict=True))}
    for source in (PRINTED, THINKING):
        chat, messages = ChatTemplate(source), [dict[str, Any](USER), answer, dict[str, Any](USER), answer]
        options = {"chat_template": source, "add_generation_prompt": True, "return_dict": False}
        assert encode_messages(tagged(), chat, messages) == theirs().apply_chat_template(messages, **options)


def test_half_a_surrogate_pair_in_a_message() -> None:
    with pytest.raises(RingkvError, match="surrogate"):
        encode_messages(tagged(), template("plain"), [{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize(
    "source, message",
    [
        ("{% if %}", "Expected an expression"),
        ("{% for x in y %}", "chat template: "),
        ("{{ raise_exception('Only\nusers') }}", "chat template: Only users$"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'file' %}", "no loader"),
        ("x" * (1 << 18 | 1), "262145 characters"),
    ],
)
def test_templates_that_fail(source: str, message: str) -> None:
    with pytest.raises(RingkvError, match=message) as caught:
        ChatTemplate(source).render([USER])
    assert str(caught.value).startswith("chat template: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_templates_that_reach_for_attributes(source: str) -> None:
    with pytest.raises(RingkvError, match="chat template: "):
        ChatTemplate(source).render([dict(USER)])


DOUBLED = "{% set n = namespace(x=['a' * 1000]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DEEPER = "{% set n = namespace(x=1) %}{% for i in range(999) %}{% set n.x = (n.x,) %}{% endfor %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}12345678{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) if range(99999)|list|length < 0 %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursion in width": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursion by caller": "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "recursive loop": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling blocks": "{% set n = namespace(x='aa') %}{% for a in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "a long block": "{% set x %}{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a long list": "{{ 10 ** 9 * [1] }}",
    "a large int": "{{ (9 ** 9999) ** 9999 }}",
    "a product of ints": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a long numeral": "{% set x = ('f' * 999999)|int(base=16) %}{{ x // (x - 1) }}",
    "a wide indent": "{{ [[1]]|tojson(indent=10 ** 11) }}",
    "a wide indent as text": "{{ [[1]]|tojson(indent='x' * 99999) }}",
    "work that is paid back": "{{ [1]|tojson(indent=-(10 ** 12)) }}{{ 'x' * 10 ** 8 }}",
    "a wide filter": "{{ 'a'|indent(first=true, width=10 ** 10) }}",
    "a wide filter of lines": "{{ ('\\n' * 99999)|indent('x' * 999, blank=true) }}",
    "a deep indent": "{% set n = namespace(x=[1]) %}{% for a in range(90) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ ([n.x] * 999)|tojson(indent=9) }}",
    "a long separator": "{{ ([1] * 9999)|tojson(separators=('x' * 9999, ':')) }}",
    "a wide date": "{{ strftime_now('%9999999Y' * 99999) }}",
    "replacing": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "replacing by filter": "{{ ('a' * 999999)|replace('a', 'b' * 999999) }}",
    "joining": "{{ ('a' * 999999).join(['b'] * 9999) }}",
    "joining by filter": "{{ range(9999)|join('b' * 999999) }}",
    "joining long texts": "{{ (['a' * 999999] * 99999)|join }}",
    "scanning": "{% set x = 'a' * 1000000 %}{{ (x ~ x).strip('b' * 1000000 ~ 'a') }}",
    "scanning by filter": "{% set x = 'a' * 1000000 %}{{ (x ~ x)|trim('b' * 1000000 ~ 'a') }}",
    "scanning from the right": "{% set x = 'a' * 1000000 %}{{ (x ~ x ~ x).rsplit(x ~ 'b' ~ x, 1) }}",
    "slices that are kept": "{% set x = 'a' * 999999 %}{% set n = namespace(x=[]) %}"
    "{% for a in range(300) %}{% set n.x = n.x + [x[1:]] %}{% endfor %}",
    "nested lists": DOUBLED + "{{ n.x }}",
    "nested lists as JSON": DOUBLED + "{{ n.x|tojson }}",
    "nested lists by ~": DOUBLED + "{{ 'x' ~ n.x }}",
    "nested lists as text": DOUBLED + "{{ n.x|string }}",
    "nested lists as safe text": DOUBLED + "{{ n.x|safe }}",
    "nested lists in a message": DOUBLED + "{{ raise_exception(n.x) }}",
    "nested lists compared": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ n.x == y }}",
    "nested lists in order": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ n.x < y }}",
    "nested lists found": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ n.x in [y] }}",
    "nested lists tested": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ n.x is eq(y) }}",
    "nested lists selected": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ [n.x]|select('in', [y])|list|length }}",
    "nested lists sorted": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ [n.x, y]|sort|length }}",
    "nested lists mapped": DOUBLED + "{{ [n.x]|map('default')|join }}",
    "nested values": DOUBLED
    + "{% set y = n.x %}"
    + DOUBLED
    + "{{ {'a': y}.values()|list == {'a': n.x}.values()|list }}",
    "nested items": DOUBLED + "{% set y = n.x %}" + DOUBLED + "{{ {'a': y}.items() == {'a': n.x}.items() }}",
    "nested tuples as keys": DOUBLED.replace("[n.x, n.x]", "(n.x, n.x)").replace("['a' * 1000]", "('a',)")
    + "{{ {n.x: 1} }}",
    "deep tuples as keys": DEEPER + "{{ {n.x: 1} }}",
    "deep tuples as items": DEEPER + "{{ {}[n.x] }}",
    "deep tuples in a dict": DEEPER + "{{ n.x in {} }}",
    "deep tuples gotten": DEEPER + "{{ {}.get(n.x) }}",
    "deep tuples, once": DEEPER + "{{ [n.x]|unique|list }}",
}

REFUSED = {
    "{{ 'a'.ljust(10 ** 10) }}": "attribute 'ljust' of 'str' object",
    "{{ 'a'|center(10 ** 10) }}": "No filter named 'center'",
    "{{ 'a'|wordwrap(1, wrapstring='b' * 999999) }}": "No filter named 'wordwrap'",
    "{{ '{:99999999999d}'.format(1) }}": "attribute 'format' of 'str' object",
    "{{ '{:{w}}'.format(1, w=10 ** 10) }}": "attribute 'format' of 'str' object",
    "{{ 'a'['format'](1) }}": "attribute 'format' of 'str' object",
    "{{ '{a:99999999999d}'.format_map({'a': 1}) }}": "attribute 'format_map' of 'str' object",
    "{{ '%99999999999d' % 1 }}": "operator %: accepted are numbers",
    "{{ '%999999s' % 1 }}": "operator %: accepted are numbers",
    "{{ '%*d' % (10 ** 10, 1) }}": "operator %: accepted are numbers",
    "{{ '%99999999999d'|format(1) }}": "No filter named 'format'",
    "{{ '%99999999999d' is even }}": "No test named 'even'",
    DOUBLED + "{{ 'x%s' % [n.x] }}": "operator %: accepted are numbers",
    DOUBLED + "{{ 'x{}'.format(n.x) }}": "attribute 'format' of 'str' object",
    DOUBLED + "{{ [n.x, n.x]|sum(start=[]) }}": "No filter named 'sum'",
    "{{ (1).to_bytes(10 ** 10, 'big') }}": "attribute 'to_bytes' of 'int' object",
    "{{ ('\t' * 999999).expandtabs(999999) }}": "attribute 'expandtabs' of 'str' object",
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}": "attribute 'translate' of 'str' object",
    "{{ 'a'.encode() * 10 ** 10 }}": "attribute 'encode' of 'str' object",
    "{{ 1.5|round(10 ** 9) }}": "No filter named 'round'",
    "{% for x in messages %}{{ loop.changed(x) }}{% endfor %}": "attribute 'changed' of 'LoopContext' object",
    "{{ messages|attr('append') }}": "No filter named 'attr'",
    "{{ dict(a=1) }}": "'dict' is undefined",
    "{{ cycler(1) }}": "'cycler' is undefined",
}


# What only the clock stops, and what Python's own bound does.
SLOW = {"loops", "loops with output", "recursion in width"}
DEEP = {"recursion", "recursion by caller", "recursive loop"}


@pytest.mark.parametrize("case", ENDLESS)
def test_templates_without_end_are_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread, soon, and before the memory is taken."""
    # What the budget stops is stopped by it and not by the clock, however slow the machine is.
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5 if case in SLOW else 15)
    caught: list[str] = []

    def run() -> None:
        try:
            ChatTemplate(ENDLESS[case]).render([USER])
        except RingkvError as error:
            caught.append(str(error))

    threads = threading.active_count()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive()
    wanted = "stopped after 0.5 seconds" if case in SLOW else "RecursionError: " if case in DEEP else "stopped: it "
    assert [message.removeprefix("chat template: ")[: len(wanted)] for message in caught] == [wanted]
    assert threading.active_count() == threads


@pytest.mark.parametrize("source", REFUSED)
def test_what_no_chat_template_needs_is_refused_by_name(source: str) -> None:
    with pytest.raises(RingkvError, match=re.escape(REFUSED[source])):
        ChatTemplate(source).render([dict(USER)])


def test_namespaces_that_hold_one_another_print_nothing() -> None:
    source = "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
    assert ChatTemplate(source + "{{ n }} {{ [n.x] }}").render([USER]) == "<Namespace> [<Namespace>]"


def test_a_template_is_whole_after_it_was_stopped() -> None:
    source = "{% if messages|length > 1 %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages[0].content }}"
    stopped = ChatTemplate(source)
    with pytest.raises(RingkvError, match="stopped"):
        stopped.render([USER, USER])
    assert stopped.render([USER]) == USER["content"]


def test_long_conversations_render() -> None:
    """The bounds are far from what a long prompt needs: 2,000 turns, and one message of 4 MB."""
    turns = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "word " * 400}] * 1000
    assert len(template("thinking").render(turns)) > 4_000_000
    assert len(template("trimmed").render([{"role": "user", "content": "word " * 800_000}])) > 4_000_000


FEATURES = [
    "{{ 12345678901|string }} {{ [1] * 2 }} {{ 'ab' * 2 }} {{ 2 ** 10 * 3 }} {{ 2 ** 0.5 > 1 }} {{ 7 % 4 }}",
    "{{ -7 // 2 }}",
    "{{ [1, 'b', none, true] }} {{ (1, 2) }} {{ {'a': 1, 2: [3]} }} {{ [1] + [2] }} {{ (1,) + (2,) }}",
    "{{ 1 ~ 'a' ~ [2] }}",
    "{{ 1 < 2 <= 2 }} {{ 'a' in 'cab' }} {{ 'a' not in ['b'] }} {{ 'a' in {'a': 1} }} {{ [1] == [1] }}",
    "{{ 1 != 2 > 0 }}",
    "{{ 'abc'[1:] }} {{ 'abc'[::-1] }} {{ [1, 2, 3][:-1] }} {{ messages[-1].role[-3:] }} {{ range(3, 9, 2)|list }}",
    "{{ ' aXb '|trim }} {{ 'xax'|trim('x') }} {{ 'aB'|upper }} {{ 'aB'|lower }} {{ 'ab cd'|title }}",
    "{{ 'aB c'|capitalize }}",
    "{{ 'aab'|replace('a', 'b') }} {{ 'aab'|replace('a', 'b', 1) }} {{ '<a>'|e }} {{ '<a>'|escape|safe }}",
    "{{ '<'|safe }}",
    "{{ 'abc'|length }} {{ [1, 2]|count }} {{ [3, 1]|first }} {{ [3, 1]|last }} {{ [3, 1]|sort }} {{ [3, 1]|min }}",
    "{{ 'ac'|max }}",
    "{{ nothing|default('x') }} {{ ''|d('x', true) }} {{ [1, 1, 2]|unique|list }} {{ [1, 2]|reverse|list }}",
    "{{ 'ab'|reverse }}",
    "{{ '7'|int + 1 }} {{ '1.5'|float }} {{ -3|abs }} {{ 'ab'|list }} {{ [1, 2]|join(', ') }} {{ ['a', 'b']|join }}",
    "{{ messages|map(attribute='role')|join('-') }} {{ ['a']|map('upper')|list }} {{ [0, 1]|select|list }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ messages|rejectattr('role', 'eq', 'x')|list|length }}",
    "{{ [1, 2, 3]|select('gt', 1)|list }} {{ [1, 2]|reject('in', [2])|list }} {{ [none, 1]|reject('none')|list }}",
    "{% for k, v in {'b': 1, 'a': [2]}|dictsort %}{{ k }}{{ v }}{% endfor %} {{ {'a': 1}|items|list }}",
    "{{ {'b': 1}|list }}",
    "{{ {'é': ['<', 1.5, none, true]}|tojson }} {{ [1, {'b': 2, 'a': 1}]|tojson(indent=4, sort_keys=true) }}",
    "{{ {'a': [1]}|tojson(indent=1)|indent }} {{ 'a\n\nb'|indent(2, true) }} {{ 'a\u2028b'|indent('> ', blank=true) }}",
    "{{ [[1]]|tojson(indent='--') }} {{ [[1]]|tojson(indent=-1) }} {{ [[1]]|tojson(indent='') }}",
    "{{ {'é': '<'}|tojson(ensure_ascii=true, separators=(',', ':')) }} {{ messages[0]|tojson|string|length }}",
    "{{ ' ab '.strip() }} {{ 'xab'.lstrip('x') }} {{ 'abx'.rstrip('x') }} {{ 'a b'.split() }}",
    "{{ 'a-b-c'.rsplit('-', 1) }}",
    "{{ 'a-b'.split('-')[-1] }} {{ 'ab'.startswith(('x', 'a')) }} {{ 'ab'.endswith('b') }}",
    "{{ 'aab'.replace('a', 'c') }}",
    "{{ 'ab'.upper() }} {{ 'AB'.lower() }} {{ 'ab c'.title() }} {{ 'ab'.capitalize() }} {{ 'abb'.count('b') }}",
    "{{ 'ab'.find('b') }}",
    "{{ ', '.join(['a', 'b']) }} {{ 'a\nb'.splitlines() }} {{ 'a=b'.partition('=') }} {{ 'ab'.removeprefix('a') }}",
    "{{ '1'.isdigit() }}",
    "{{ messages[0].get('role') }} {{ messages[0].get('x', 'y') }} {{ messages[0].keys()|list }}",
    "{{ {'a': 1}.values()|list }}",
    "{% for k, v in messages[0].items() %}{{ loop.index }}{{ k }}{{ v }}{{ ', ' if not loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if not loop.first }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in messages %}{{ loop.first }}{{ loop.length }}{{ loop.revindex0 }}{{ loop.depth }}{% endfor %}",
    "{{ 'a' is string }} {{ 1 is number }} {{ {} is mapping }} {{ [] is iterable }} {{ 'a' is sequence }}",
    "{{ none is none }}",
    "{{ true is boolean }} {{ true is true }} {{ 1 is integer }} {{ 1.0 is float }} {{ x is undefined }}",
    "{{ 1 is sameas(1) }}",
    "{% set ns = namespace(a=1, b=[]) %}{% set ns.a = ns.a + 1 %}{% set ns.b = ns.b + [ns['a']] %}{{ [ns.a, ns.b] }}",
    "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}"
    "{% call f(1, y=3) %}z{% endcall %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x|length }}{% filter upper %}b{% endfilter %}{% if x and not y %}c{% endif %}",
    "{% for i in range(9) if i > 2 %}{% if i == 5 %}{% continue %}{% endif %}{% if i > 6 %}{% break %}{% endif %}"
    "{{ i }}{% else %}x{% endfor %}",
    "{{ strftime_now('%Y')|length }} {{ 'abc'.nothing is defined }} {{ messages[9] is defined }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_what_a_template_may_do(source: str) -> None:
    """As transformers renders it."""
    messages = [dict(USER), {"role": "assistant", "content": "Yes."}]
    assert ChatTemplate(source).render(messages) == theirs().apply_chat_template(
        messages, chat_template=source, tokenize=False
    )


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
PROMPTS = {
    "opens": (HEAD + OPENED, True),
    "opens and speaks": (HEAD + OPENED.replace("<think>\n", "<think>\nOkay, "), True),
    "closes": (HEAD + OPENED.replace("<think>\n", "<think>\n\n</think>\n\n"), False),
    "opens again": (HEAD + OPENED.replace("<think>\n", "<think></think><think>"), True),
    "none": (HEAD + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", False),
    "speaks of it in front": ("Think after <think>.\n" + HEAD + "{% if add_generation_prompt %}Go:{% endif %}", False),
    "speaks of it behind": (HEAD + "Think after <think>.{% if add_generation_prompt %}\nGo:{% endif %}", False),
    "opens behind the prompt": (HEAD + "{% if add_generation_prompt %}Go:{% endif %}\n<think>", True),
    "otherwise ends": (HEAD + "{% if add_generation_prompt %}<think>{% else %}<|im_end|>{% endif %}", True),
    "whatever was asked": (HEAD + "<|im_start|>assistant\n<think>\n", True),
    "whatever was asked, and speaks": (HEAD + "<|im_start|>assistant\n<think>\nOkay, ", False),
    "must add a prompt": (
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}" + HEAD + OPENED,
        True,
    ),
    "words only": ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    "half of it": ("{% for m in messages %}{{ m.content }}{% endfor %}think>", False),
}


@pytest.mark.parametrize("content", ["Hi", "What is <think>?", "<think>\n", "</think>", "x <", "</think>b<think>"])
@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("single", [True, False], ids=["tokens", "texts"])
def test_the_generation_prompt_decides_whether_a_thought_is_open(single: bool, case: str, content: str) -> None:
    """Not what a message says, nor what the template says elsewhere."""
    source, inside = PROMPTS[case]
    made = backend() if single else tokenizers.Tokenizer(backend().model)
    if not single:
        made.pre_tokenizer, made.decoder = backend().pre_tokenizer, backend().decoder
        made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(made)
    tags = ThoughtTags.detect(source + "<think>", tokenizer.control_tokens)
    assert tags is not None
    assert (tags.ids is not None) == single
    chat = Conversation(tokenizer, ChatTemplate(source), [{"role": "user", "content": content}], tags=tags)
    assert chat.begins_inside() == inside
    assert b"".join(map(tokenizer.token_bytes, chat.ids)).decode() == ChatTemplate(source).render(
        [{"role": "user", "content": content}]
    )


LLAMA2 = """{% if messages[0].role == 'system' %}
{%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn') }}{% endif %}
{%- if m.role == 'user' %}<s>[INST] {{ (system if loop.first else '') ~ m.content }} [/INST]
{%- else %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"""
MERGED = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
DEMANDING = "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}" + PLAIN
PINNED = {  # what is pinned of a conversation whose system message is " Be brief.\n"
    "plain": (PLAIN, "<s><|im_start|>system\n Be brief.\n<|im_end|>\n"),
    "trimmed": (TRIMMED, "<s><|im_start|>system\nBe brief.<|im_end|>"),
    "demands a question": (DEMANDING, "<s><|im_start|>system\n Be brief."),
    "llama 2": (LLAMA2, "<s>[INST] <<SYS>>\n Be brief."),
    "merged": (MERGED, " Be brief.\n\n\n"),
    "otherwise ends": (
        "{{ messages[0].content }}<|im_{% if messages[1] %}start|>{{ messages[1].content }}{% else %}end|>{% endif %}",
        " Be brief.\n",
    ),
    "in the last message": (
        "{{ messages[1:] | map(attribute='content') | join }}{{ messages[0].content }}",
        "Hi. Be brief.",
    ),
    "twice": ("{{ messages[0].content }}|{{ messages[0].content }}{{ messages[1].content }}", " Be brief."),
    "as JSON": ("{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages[1].content }}", '" Be brief.'),
    "left out": ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", ""),
    "in capitals": ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", " BE BRIEF.\n"),
    "cut": ("{{ messages[0].content[:5] }}{{ messages[1].content }}", ""),
    "counted": ("{{ messages[0].content | length }} {{ messages[0].content }}", ""),
}


@pytest.mark.parametrize("case", PINNED)
@pytest.mark.parametrize("own", [smollm2, lambda: tagged()], ids=["smollm2", "bytes"])
def test_the_system_message_is_found_in_the_rendered_conversation(own: Any, case: str) -> None:
    source, wanted = PINNED[case]
    tokenizer = own()
    messages = [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi."}]
    chat = Conversation(tokenizer, ChatTemplate(source, SPECIAL_TOKENS), messages)
    held = b"".join(map(tokenizer.token_bytes, chat.ids[: chat.system_ids()])).decode()
    assert held.startswith(wanted)
    assert len(held) - len(wanted) < 3, "a token may hold the characters behind"
    assert (chat.system_ids() == 0) == (wanted == "")


def test_a_system_message_stands_at_the_beginning() -> None:
    system, blank = {"role": "system", "content": "Be brief."}, {"role": "system", "content": " "}
    for messages in ([USER, system], [USER], [blank, USER]):
        assert Conversation(tagged(), template("plain"), messages).system_ids() is None
    two = Conversation(tagged(), template("plain"), [{"role": "developer", "content": "Why?"}, system, USER])
    head = "<s><|im_start|>developer\nWhy?<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
    assert two.ids[: two.system_ids()] == tagged().encode(head)


def pushed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


@given(ids=st.lists(st.integers(0, 49151) | st.sampled_from([0, 1, 2, *range(120, 260)]), max_size=30))
def test_pushed_text_is_the_text_of_all_ids(ids: list[int]) -> None:
    """One-shot decoding by the tokenizers library is the oracle, at every step: no more than a character is held."""
    oracle = smollm2()._backend
    assert "".join(pushed(smollm2(), ids)) == smollm2().decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    decoder, text = IncrementalDecoder(smollm2()), ""
    for end, id in enumerate(ids, 1):
        text += decoder.push(id)
        whole = oracle.decode(ids[:end], skip_special_tokens=True)
        assert whole in (text, f"{text}\ufffd")


@given(data=st.binary(max_size=12))
def test_any_bytes_are_decoded_as_python_does(data: bytes) -> None:
    tokenizer = tagged()
    by_byte = {tokenizer.token_bytes(id): id for id in range(256)}
    ids = [by_byte[bytes([byte])] for byte in data]
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_characters_come_whole_and_bad_bytes_at_once() -> None:
    tokenizer = tagged()
    by_byte = {tokenizer.token_bytes(id): id for id in range(256)}

    def push(data: bytes) -> list[str]:
        return pushed(tokenizer, [by_byte[bytes([byte])] for byte in data])

    assert push("é한".encode()) == ["", "é", "", "", "한", ""]
    assert [text for text in push(FAMILY.encode()) if text] == list(FAMILY)
    assert push(b"\xffa") == ["\ufffd", "a", ""]
    assert push(b"\xf0\x9fa") == ["", "", "\ufffda", ""]
    assert push(b"\xc0\xaf") == ["\ufffd", "\ufffd", ""]
    assert push("👍".encode()[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_print_nothing_and_tags_do() -> None:
    tokenizer = tagged()
    ids = tokenizer.encode("a<think>b</think>c<|im_end|>")
    assert "".join(pushed(tokenizer, ids)) == "a<think>b</think>c"
    euro = tokenizer.encode("€")
    assert "".join(pushed(tokenizer, [euro[0], tokenizer.control_tokens["<|im_end|>"], *euro[1:]])) == "€"


def test_the_first_space_of_sentencepiece_is_dropped() -> None:
    made = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}, []))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(made)
    assert pushed(tokenizer, [2, 2, 3, 4, 5]) == ["a", " a", "", "", "€", ""]
    assert pushed(tokenizer, [3, 4, 5, 2]) == ["", "", "€", " a", ""]
    for ids in ([2, 2, 3, 4, 5], [0, 0, 1], [3, 1], [3, 4, 5, 0], []):
        assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode([2, 2, 0]) == made.decode([2, 2, 0])


def test_a_template_with_half_a_surrogate_pair_is_refused_by_name():
    with pytest.raises(RingkvError, match="chat template: it holds half a surrogate pair"):
        ChatTemplate("{{ messages }}\ud800")
    assert ChatTemplate("\U0001f600").source == "\U0001f600"
