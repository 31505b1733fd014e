"""What ends a turn: what files name, what the template writes, what is known; by hand, and by a run."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ringkv import SamplingParams
from ringkv.engine.text.endings import ending_tokens
from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.tokenizer import Tokenizer
from scripted import Script, byte_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = "{% for m in messages %}<|start|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
NEXT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"  # GLM: the next turn ends this one
LAST = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '<|fin|>' if loop.last else '<|sep|>' }}{% endif %}{% endfor %}"
)
LONGEST = "{% for m in messages %}{{ m.content }}<|a|>x{% endfor %}"
NO_TOKEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LATER = "{% for m in messages %}{{ m.content }} END <|im_start|>{% endfor %}"
LOUD = "{% for m in messages %}{{ m.content | lower }}<|sep|>{% endfor %}"
STRICT = "{{ raise_exception('two turns, please') if messages | length < 3 }}" + CHATML
NEVER = "{{ raise_exception('no') }}"

WRITTEN: dict[str, tuple[str | None, set[str]]] = {
    "chatml": (CHATML, {"<|im_end|>"}),
    "llama3": (LLAMA3, {"<|eot|>"}),
    "blank before": (SPACED, {"</turn>"}),
    "next turn": (NEXT, {"<|user|>"}),
    "last turn": (LAST, {"<|fin|>", "<|sep|>"}),
    "longest": (LONGEST, {"<|a|>x"}),
    "no token": (NO_TOKEN, set()),
    "other text before": (LATER, set()),
    "answer changed": (LOUD, set()),
    "fails once": (STRICT, {"<|im_end|>"}),
    "fails": (NEVER, set()),
    "no template": (None, set()),
}
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end_header|>", "<|eot|>", "[INST]", "</turn>", "<|user|>"]
TOKENS += ["<|assistant|>", "<|fin|>", "<|sep|>", "<|a|>", "<|a|>x"]


def tokenizer_of(tokens: list[str], **names: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({text: id for id, text in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, normalized=False) for text in tokens])
    return Tokenizer(backend, special_tokens=names)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_after_an_answer_ends_a_turn(name: str) -> None:
    source, wanted = WRITTEN[name]
    # No text of TURN_ENDS is among the tokens but <|im_end|>.
    tokens = TOKENS if "<|im_end|>" in wanted else [text for text in TOKENS if text != "<|im_end|>"]
    tokenizer = tokenizer_of(tokens)
    template = None if source is None else ChatTemplate(source, {"eos_token": "</turn>"})
    found = ending_tokens((), {}, tokenizer, template)
    assert set(found.values()) == wanted
    assert {tokenizer.control_tokens[text]: text for text in wanted} == found


def test_the_union_of_all_that_is_named() -> None:
    tokenizer = tokenizer_of(["<|im_end|>", "<|endoftext|>", "<|eot|>", "<s>", "</s>"], eos_token="<s>")
    ids = tokenizer.control_tokens
    template = ChatTemplate(LLAMA3)
    every = ending_tokens((5,), {"eos_token_id": None, "temperature": 1}, tokenizer, template)
    texts = {text: id for id, text in every.items()}
    assert texts == {ALPHABET[5]: 5} | {text: ids[text] for text in ids}
    assert list(every) == sorted(every)


@pytest.mark.parametrize("theirs", [7, [7], [7, 8], (7, 8)])
def test_generation_config_has_the_last_word(theirs: Any) -> None:
    """Where it names ending tokens, nothing is added to what is named: transformers' generate stops where we do."""
    tokenizer = tokenizer_of(TOKENS, eos_token="<|eot|>")
    found = ending_tokens((5,), {"eos_token_id": theirs}, tokenizer, ChatTemplate(CHATML))
    assert set(found) == {5, 7, tokenizer.control_tokens["<|eot|>"]} | {*([theirs] if theirs == 7 else theirs)}


def test_without_a_tokenizer() -> None:
    assert ending_tokens((9, 2), {"eos_token_id": [4, 2]}, None, None) == {2: "", 4: "", 9: ""}
    assert ending_tokens((), {}, None, None) == {}


@pytest.mark.parametrize("eos", ["3", "x", {}, [[3]], ["3"], 3.0, True, [True], -1, 2**31, [3, None], ""])
def test_ending_tokens_that_are_no_ids_are_refused(eos: Any) -> None:
    with pytest.raises(RingkvError, match=r"^generation_config\.json: eos_token_id = .*: accepted is an int from 0 to"):
        ending_tokens((), {"eos_token_id": eos}, None, None)


def test_smollm2() -> None:
    checkpoint = open_checkpoint("smollm2")
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    assert ending_tokens((2,), {}, tokenizer, template) == {0: "<|endoftext|>", 2: "<|im_end|>"}


def test_a_run_ends_with_the_turn() -> None:
    """eos is one token, the template ends turns with another: the fault was to run to max_tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = (tokenizer.control_tokens["<|im_start|>"],)
    end = tokenizer.control_tokens["<|im_end|>"]
    script = Script(lambda _: [*tokenizer.encode("Yes."), end, *tokenizer.encode("No.")], tokenizer)
    done = script.engine.generate("Well?", SamplingParams(temperature=0, max_tokens=20))
    assert (done.text, done.finish_reason, done.stop_reason) == ("Yes.", "stop", end)
    assert script.engine.prompts.endings[end] == "<|im_end|>"
    on = script.engine.generate("Well?", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert on.finish_reason == "length"
