"""Tokenizers: transformers' ids and texts, exact bytes, and control tokens only where they are meant."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ringkv.engine.text.encoding import Conversation, IncrementalDecoder
from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.gguf import GGUFCheckpoint, smollm2_path
from ringkv.models.checkpoints.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from ringkv.models.tokenizer import Tokenizer

FAMILY = "👨‍👩‍👧‍👦"
BLANKS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\t",
    "\t\t x",
    " " * 7,
    " " * 40,
    "\n" * 9,
    " \n \n  x",
    "\u00a0",
    "\u3000",
]
ENGLISH = ["Hello, world!", "I'm sure they'll say we've won; it's DON'T, isn't it?", "naïve café Ångström", "é"]
NUMERALS = "½ ² Ⅻ ٣"
DIGITS = ["0", "7", "42", "123", "1234", "3.14159", "1,000,000", " 2024", "x1y22z333", NUMERALS, "12:30:59", "0x1F"]
CODE = [
    "def f(x):\n    return x ** 2  # comment",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "if x:\n\tpass\n\n\n\nelse:\r\n\tfoo()",
    "a->b::c<T&&>",
    "<?xml?>",
    "https://example.org/a_b?c=d&e=%20#f",
    "e-mail@example.org",
    "$x^2$ \\frac{1}{2}",
]
SCRIPTS = [
    *("안녕하세요, 세상!", "한국어 텍스트입니다", "한글 ㄱㄴㄷ", "こんにちは世界。カタカナー", "你好，世界！"),
    *("Привет, мир", "مرحبا بالعالم", "שלום", "สวัสดี", "नमस्ते"),
]
EMOJI = ["😀", "👍🏽🇰🇷", FAMILY, "❤️ ok", "🏳️‍🌈🏳️‍⚧️", "🤷🏽‍♀️", "😀" * 5, "a😀b"]
SIGNS = ["???!!!...---", "\"quoted\" 'single' `tick`", "a…b—c–d", "x<y", "<thin", "<|im_", "im_end|>", "| a |\n|---|"]
ODD = ["\x00", "\x07bell", "\x7f", "\ufeffbom", "\u200bzero", "\u0301combining", "\U0010ffff", "\ue000", "\ufffd"]
PIECES = [*BLANKS, *ENGLISH, *DIGITS, *CODE, *SCRIPTS, *EMOJI, *SIGNS, *ODD]

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|im_start|>user\nHi<|im_end|>\n"]
AROUND = [("a", "b"), ("a", " "), (" ", "b"), (" ", " "), ("\n", "é"), ("é", "\n")]
TEXTS = [
    *PIECES,
    *CONTROL,
    *(left + right for left, right in itertools.product(PIECES[15:40:3], PIECES[1:60:5])),
    *(f"{left}{token}{right}" for token in CONTROL for left, right in AROUND),
]


def mixtures(*texts: str) -> st.SearchStrategy[str]:
    """Texts made of pieces, control tokens of all kinds and arbitrary characters."""
    return st.lists(st.sampled_from([*PIECES, *texts]) | st.text(max_size=4), max_size=8).map("".join)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return _smollm2()


@cache
def _smollm2() -> Tokenizer:
    path = smollm2_path()
    assert path is not None
    tokenizer = GGUFCheckpoint(path).tokenizer()
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    path = smollm2_path()
    assert path is not None
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_smollm2_ids_equal_transformers(smollm2: Tokenizer, theirs: Any) -> None:
    assert len(set(TEXTS)) > 200
    for text in TEXTS:
        # transformers reads a GGUF of SmolLM2 without its Digits step, which tells on numerals beyond 0 to 9.
        if NUMERALS not in text:
            assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_smollm2_texts_equal_transformers(smollm2: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_smollm2_control_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.control_tokens["<|im_end|>"] == 2
    assert smollm2.control_tokens["<file_sep>"] == 5
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.add_bos, smollm2.size) == (1, (2,), False, 49152)
    assert smollm2.chat_template is not None
    assert "<|im_start|>system" in smollm2.chat_template


def test_every_id_has_its_bytes(smollm2: Tokenizer, theirs: Any) -> None:
    singles = {smollm2.token_bytes(id) for id in range(smollm2.size)}
    assert {bytes([byte]) for byte in range(32, 127)} < singles
    for id in range(smollm2.size):
        assert smollm2.token_bytes(id).decode(errors="replace") == theirs.decode([id]), id
    assert smollm2.token_bytes(49152) == b""


# The published pre-tokenizers: tokenizer.json of SmolLM2, Qwen2.5, Llama 3 and DeepSeek-R1-Distill-Qwen.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm": {
        "normalizer": None,
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
    **{
        name: {
            "normalizer": normalizer,
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
        for name, pattern, normalizer in (
            ("qwen2", QWEN2, {"type": "NFC"}),
            ("deepseek-r1-qwen", QWEN2, {"type": "NFC"}),
            ("llama-bpe", LLAMA3, None),
        )
    },
}
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]
ADDED = ["<think>", "</think>"]


@cache
def published(name: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A small BPE trained behind a published pre-tokenizer, as tokenizer.json has it, and as GGUF metadata has it."""
    parts = PUBLISHED[name]
    trained = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "normalizer": parts["normalizer"],
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts["pretokenizers"]},
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": name == "llama-bpe"},
            }
        )
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    trained.add_special_tokens(SPECIAL)
    trained.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    tokens = [trained.id_to_token(id) for id in range(trained.get_vocab_size())]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*tokens, "[PAD706]", "[PAD707]"],
        "tokenizer.ggml.token_type": [
            *(3 if token in SPECIAL else 4 if token in ADDED else 1 for token in tokens), 5, 5
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }  # fmt: skip
    return trained, metadata


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = gguf_tokenizer(metadata, Path("t.gguf"))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_gguf_tokenizers_equal_the_published_ones(name: str) -> None:
    wanted, metadata = published(name)
    tokenizer = from_gguf(metadata)
    for text in [*TEXTS, "e\u0301 A\u030a", *(f"{text}<｜User｜>{text}" for text in PIECES)]:
        ids = wanted.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == wanted.decode(ids, skip_special_tokens=True), text


def test_what_the_pre_tokenizers_keep_apart() -> None:
    """A vocabulary that would merge more than each of them lets it: by hand."""
    pairs = ["1 2", "12 3", "123 4", "! Ċ", "Ã ©"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in pairs)]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": pairs}
    kept = {
        name: [tokens[id] for id in from_gguf(metadata | {"tokenizer.ggml.pre": name}).encode("1234!\ne\u0301")]
        for name in PRE_TOKENIZERS
    }
    assert kept["smollm"] == ["1", "2", "3", "4", "!", "Ċ", "e", "Ì", "ģ"]
    assert kept["qwen2"] == kept["deepseek-r1-qwen"] == ["1", "2", "3", "4", "!Ċ", "Ã©"]
    assert kept["llama-bpe"] == ["123", "4", "!Ċ", "e", "Ì", "ģ"]


@pytest.mark.parametrize("name", ["qwen2", "deepseek-r1-qwen"])
@given(text=mixtures(*ADDED, *SPECIAL))
def test_gguf_tokenizers_equal_the_published_ones_on_any_text(name: str, text: str) -> None:
    wanted, _ = published(name)
    assert from_gguf_once(name).encode(text) == wanted.encode(text, add_special_tokens=False).ids


@cache
def from_gguf_once(name: str) -> Tokenizer:
    return from_gguf(published(name)[1])


def test_transformers_own_qwen2() -> None:
    """DeepSeek-R1-Distill-Qwen too is transformers' Qwen2Tokenizer."""
    from transformers import Qwen2Tokenizer

    metadata = published("qwen2")[1]
    tokens = metadata["tokenizer.ggml.tokens"]
    wanted = Qwen2Tokenizer(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        eos_token="<|im_end|>", unk_token=None, pad_token=None,
    )  # fmt: skip
    for name in ("qwen2", "deepseek-r1-qwen"):
        tokenizer = from_gguf(metadata | {"tokenizer.ggml.pre": name})
        for text in PIECES:
            assert tokenizer.encode(text) == wanted.encode(text, add_special_tokens=False), text


def test_llama3_takes_whole_words_first() -> None:
    """ignore_merges: a word of the vocabulary that no merge reaches."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("abc") == [4]
    assert from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("abc") == [3, 2]


def test_gguf_token_kinds() -> None:
    tokenizer = from_gguf_once("qwen2")
    tokens = published("qwen2")[1]["tokenizer.ggml.tokens"]
    assert tokenizer.special_ids == {tokens.index(text) for text in SPECIAL}
    assert set(tokenizer.control_tokens) == {*SPECIAL, *ADDED}
    assert tokenizer.size == len(tokens) - 2  # the last two are padding
    assert tokenizer.token_bytes(tokenizer.size) == b""
    assert tokenizer.decode([tokens.index("<think>"), tokens.index("<|im_end|>")]) == "<think>"
    assert tokenizer.token_bytes(tokens.index("<｜User｜>")) == "<｜User｜>".encode()
    assert tokenizer.eos_ids == (tokens.index("<|im_end|>"),)


def test_gguf_bos() -> None:
    """Asked for by the file, else as llama.cpp does: by Llama 3 only."""
    for name, wanted in (("qwen2", False), ("llama-bpe", True), ("smollm", False)):
        tokenizer, metadata = from_gguf_once(name), published(name)[1]
        bos = metadata["tokenizer.ggml.bos_token_id"]
        assert (tokenizer.bos_id, tokenizer.add_bos) == (bos, wanted)
        for text in ("a", "<|begin|>a", ""):
            plain = text.removeprefix("<|begin|>")
            assert tokenizer.encode(text, bos=True) == [
                *([bos] if wanted or text != plain else []),
                *tokenizer.encode(plain),
            ]
        assert from_gguf(metadata | {"tokenizer.ggml.add_bos_token": not wanted}).add_bos is not wanted


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ggml.model": "llama"}, r"tokenizer\.ggml\.model = 'llama'"),
        ({"ggml.model": "bert"}, r"tokenizer\.ggml\.model = 'bert'"),
        ({"ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre = 'tekken'"),
        ({"ggml.pre": None}, r"tokenizer\.ggml\.pre"),
        ({"ggml.add_space_prefix": True}, r"add_space_prefix = True"),
        ({"ggml.tokens": ["a", 1]}, r"tokenizer\.ggml\.tokens = "),
        ({"ggml.tokens": ["a"] * 708}, "none of them twice"),
        ({"ggml.token_type": [1]}, r"one for each of 708"),
        ({"ggml.token_type": "x"}, r"tokenizer\.ggml\.token_type = 'x'"),
        ({"ggml.merges": ["a"]}, r"t\.gguf: not a tokenizer"),
        ({"ggml.merges": ["a nowhere"]}, r"t\.gguf: not a tokenizer: .*nowhere"),
        ({"ggml.eos_token_id": 708}, r"eos_token_id = 708"),
        ({"chat_template": 3}, r"tokenizer\.chat_template = 3"),
    ],
)
def test_gguf_tokenizers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    metadata = published("qwen2")[1] | {f"tokenizer.{key}": value for key, value in changes.items()}
    with pytest.raises(RingkvError, match=message) as caught:
        from_gguf({key: value for key, value in metadata.items() if value is not None})
    assert "\n" not in str(caught.value)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert gguf_tokenizer({}, Path("t.gguf")) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "no_vocab"}, Path("t.gguf")) is None
    assert Tokenizer.from_folder(tmp_path) is None
    for name in ("tokenizer.model", "tekken.json", "vocab.json", "qwen.tiktoken", "tokenizer.model.v3"):
        (tmp_path / name).write_bytes(b"of another kind")
        with pytest.raises(RingkvError) as caught:
            Tokenizer.from_folder(tmp_path)
        assert f"{name} without tokenizer.json" in str(caught.value)
        assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in str(caught.value)
        (tmp_path / name).unlink()
    for name in ("vocab.json", "tekken.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(RingkvError, match=r"tekken\.json, vocab\.json without tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def sentencepiece(style: str) -> tokenizers.Tokenizer:
    """A BPE with SentencePiece's spaces and byte tokens, in the two ways that Llama 2 and Mistral ship it."""
    corpus = [text.replace(" ", "▁") for text in ["▁" + piece for piece in PIECES[15:40]]]
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens(
        [AddedToken("[INST]", normalized=False), AddedToken("<tool>", rstrip=True, lstrip=True, normalized=False)]
    )
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [bos])
    return backend


SENTENCEPIECE = ["normalizer", "metaspace"]


@cache
def sentencepiece_pair(style: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    return sentencepiece(style), Tokenizer(
        sentencepiece(style), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.mark.parametrize("style", SENTENCEPIECE)
def test_sentencepiece_like(style: str) -> None:
    backend, tokenizer = sentencepiece_pair(style)
    assert tokenizer.drops_space
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_ids) == (True, 1, (2,))
    for text in [*PIECES, "[INST] Hi [/INST]", "<s>", "a<s>b </s> c", "x <tool> y"]:
        plain = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == plain
        assert tokenizer.decode(plain) == backend.decode(plain, skip_special_tokens=True), text
        whole = backend.encode(text).ids
        assert tokenizer.encode(text, bos=True) == (whole if not text.startswith("<s>") else whole[1:])
    euro = tokenizer.encode("€")
    assert [tokenizer.token_bytes(id) for id in euro[-3:]] == [b"\xe2", b"\x82", b"\xac"]


@pytest.mark.parametrize("style", [*SENTENCEPIECE, *PRE_TOKENIZERS])
@given(pieces=st.lists(st.sampled_from([*PIECES, *ADDED, *SPECIAL, "[INST]", "<s>", "<tool>"]), max_size=7))
def test_parts_give_the_ids_of_the_whole(style: str, pieces: list[str]) -> None:
    """Known control tokens between plain texts: the first tokenizer is the oracle where no text looks like one."""
    tokenizer = sentencepiece_pair(style)[1] if style in SENTENCEPIECE else from_gguf_once(style)
    joined = "".join(pieces)
    parts: list[str | int] = [tokenizer.control_tokens.get(piece, piece) for piece in pieces]
    assert tokenizer.encode_parts(parts) == tokenizer.encode(joined)


@pytest.mark.parametrize("style", ["metaspace", *PRE_TOKENIZERS])
@given(text=mixtures(*ADDED, *SPECIAL, "[INST]", "<s>", "<tool>", "<|im_", "end|>"))
def test_plain_text_has_no_control_token(style: str, text: str) -> None:
    tokenizer = sentencepiece_pair(style)[1] if style in SENTENCEPIECE else from_gguf_once(style)
    ids = tokenizer.encode(text, control=False)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    if style in ("smollm", "llama-bpe"):
        assert tokenizer.decode(ids) == text


def test_plain_text_cannot_name_the_secret_names(smollm2: Tokenizer) -> None:
    """The second tokenizer's names are drawn anew in each process; the text of an older one is text."""
    text = "\U0010fffd0123456789abcdef:2\U0010fffd"
    assert 2 not in smollm2.encode(text, control=False)
    assert smollm2.decode(smollm2.encode(text, control=False)) == text


def test_a_control_token_that_words_make_is_an_error() -> None:
    """A special token that merges reach: no text can hold it as text."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["ab"])
    with pytest.raises(RingkvError, match="control token 'ab' of plain text"):
        Tokenizer(backend).encode("ab", control=False)


def test_words_that_were_added_are_not_control_tokens() -> None:
    """Single characters and blanks (DeepSeek-LLM, GPT-NeoX) are parsed in any text."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["ö", "    ", "<x>"])
    tokenizer = Tokenizer(backend)
    assert list(tokenizer.control_tokens) == ["<x>"]
    assert tokenizer.encode("aö    a", control=False) == [0, 2, 3, 0]
    assert tokenizer.encode_parts(["ö", 4, "ö"]) == [2, 4, 2]
    assert tokenizer.decode([2, 3, 4]) == "ö    <x>"


def test_a_long_text_has_the_ids_of_its_parts(smollm2: Tokenizer) -> None:
    """It takes another way through the library, on which other threads run."""
    text = "A rather long text.\n" * 4000
    assert len(text) > 1 << 16
    assert smollm2.encode(text) == smollm2.encode(text[: len(text) // 2]) * 2
    with pytest.raises(RingkvError, match="surrogate"):
        smollm2.encode(text + "\ud83d")


def test_half_a_surrogate_pair(smollm2: Tokenizer) -> None:
    for control in (True, False):
        with pytest.raises(RingkvError, match="surrogate"):
            smollm2.encode("a\ud83d", control=control)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.Sequence([])])
def test_other_decoders(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(RingkvError, match=r"decoder = (WordPiece|BPEDecoder|): accepted is .*, or none"):
        Tokenizer(backend)


def words() -> tokenizers.Tokenizer:
    """Whole words, and no decoder: tokenizers puts a space between any two tokens."""
    vocabulary = {text: id for id, text in enumerate(["<unk>", "the", "cat", "sat", ".", "é", "Ġx", "", "▁y"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens(["<x>", "two words"])
    return backend


@given(ids=st.lists(st.integers(0, 14), max_size=8))
def test_words_are_joined_with_spaces(ids: list[int]) -> None:
    tokenizer, backend = Tokenizer(words()), words()
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids)


def test_words_are_encoded_as_tokenizers_does() -> None:
    text = "the cat<s> sat <x>. the  dog two words."
    assert Tokenizer(words()).encode(text) == words().encode(text, add_special_tokens=False).ids
    assert Tokenizer(words()).decode([1, 2, 3, 4]) == "the cat sat ."


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join([*map(decoder.push, ids), decoder.flush()])


def test_a_vocabulary_with_holes() -> None:
    """The library gives new tokens the number of words for an id, which may be a word's."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "<x>": 1, "b": 3}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<x>"])
    tokenizer = Tokenizer(backend)
    assert (tokenizer.size, tokenizer.token_bytes(2), tokenizer.decode([0, 2, 3])) == (4, b"", "ab")
    assert tokenizer.holes == {2}
    assert tokenizer.encode_parts(["ab", 1, "b"]) == [0, 3, 1, 3]


@pytest.mark.parametrize("blanks", ["", " ", "  ", "\n"])
def test_tokens_that_take_blanks_with_them(blanks: str) -> None:
    for style in SENTENCEPIECE:
        tokenizer = sentencepiece_pair(style)[1]
        tool = tokenizer.control_tokens["<tool>"]
        wanted = tokenizer.encode(f"x{blanks}<tool>{blanks}y")
        assert tokenizer.encode_parts([f"x{blanks}", tool, f"{blanks}y"]) == wanted
        assert wanted.count(tool) == 1


def prepending(*tokens: AddedToken) -> tokenizers.Tokenizer:
    """Single characters, behind a normaliser that puts a blank before every text between tokens (Llama 2)."""
    words = {text: id for id, text in enumerate("▁abxyz<>/[]|\U000f0000")}
    backend = tokenizers.Tokenizer(models.BPE(words, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    backend.add_tokens(list(tokens))
    return backend


NORMALIZED = [
    AddedToken("<x>", normalized=True),
    AddedToken("<y>", normalized=True, lstrip=True),
    AddedToken("<z>", normalized=False, rstrip=True),
    AddedToken("[xy]", normalized=True, single_word=True),
    AddedToken("</x>", normalized=False),
]


@given(pieces=st.lists(st.sampled_from(["a", "b", " ", "  ", "x", *(token.content for token in NORMALIZED)])))
def test_tokens_are_found_where_tokenizers_finds_them(pieces: list[str]) -> None:
    """Behind a letter a token whose text begins with a blank once normalised is text, whoever wrote it."""
    tokenizer, backend = Tokenizer(prepending(*NORMALIZED)), prepending(*NORMALIZED)
    wanted = backend.encode("".join(pieces), add_special_tokens=False).ids
    assert tokenizer.encode_parts([tokenizer.control_tokens.get(piece, piece) for piece in pieces]) == wanted


CHAT = "{% for m in messages %}<z>{{ m.role }} <y>{{ m.content }}<x>b<x> [xy]{{ m.content }}[xy]</x>{% endfor %}"
FORGED = re.compile("|".join(re.escape(token.content) for token in NORMALIZED))
STANDS_FOR_NOTHING = "\U000f0000"


@given(
    pieces=st.lists(
        st.sampled_from(["a", "b", " ", ">", "x>", "<", "/x>", "y]", "[", *(token.content for token in NORMALIZED)])
    )
)
def test_a_message_does_not_change_the_ids_of_the_template(pieces: list[str]) -> None:
    """They are those of tokenizers for the rendered text, in which what looks like a token stands for nothing."""
    backend, message = prepending(*NORMALIZED), "".join(pieces)
    tokenizer, template = Tokenizer(prepending(*NORMALIZED)), ChatTemplate(CHAT)
    harmless = template.render([{"role": "user", "content": FORGED.sub(STANDS_FOR_NOTHING, message)}])
    wanted: list[int] = []
    forged = iter(FORGED.findall(message) * 2)
    for id in backend.encode(harmless, add_special_tokens=False).ids:
        stands_for = next(forged) if id == backend.token_to_id(STANDS_FOR_NOTHING) else None
        wanted += [id] if stands_for is None else [backend.get_vocab()[letter] for letter in stands_for]
    assert Conversation(tokenizer, template, [{"role": "user", "content": message}]).ids == wanted


def test_a_token_behind_a_letter_is_text() -> None:
    tokenizer = Tokenizer(prepending(AddedToken("<x>", normalized=True)))
    token, letters = tokenizer.control_tokens["<x>"], tokenizer.encode("ya<x>")[-3:]
    assert [tokenizer.token_bytes(id) for id in letters] == [b"<", b"x", b">"]
    assert tokenizer.encode_parts(["a", token, "a ", token, token])[2:] == [
        *letters, tokenizer.encode("a")[1], token, *letters
    ]  # fmt: skip


def test_an_absurd_id() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 2**32 - 2}, []))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(RingkvError, match="id 4294967294"):
        Tokenizer(backend)


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with a tokenizer.json and other files, given as name without dots -> content."""

    def make(backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
        (backend or published("qwen2")[0]).save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return make


def from_folder(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_equals_transformers(folder: Folder) -> None:
    from transformers import AutoTokenizer

    config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "model_max_length": 8}
    config |= {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}"}
    path = folder(tokenizer_config__json=config)
    wanted, tokenizer = AutoTokenizer.from_pretrained(path), from_folder(path)
    for text in TEXTS:
        assert tokenizer.encode(text) == wanted.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, bos=True) == wanted.encode(text)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (wanted.bos_token_id, (wanted.eos_token_id,))
    assert tokenizer.chat_template == wanted.chat_template


def test_truncation_and_padding_are_off(folder: Folder) -> None:
    backend = sentencepiece("metaspace")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert len(from_folder(folder(backend)).encode("Hello, world! " * 3)) > 10
    assert len(from_folder(folder(backend)).encode("a")) < 4


def test_bos_is_the_post_processors(folder: Folder) -> None:
    config = {"bos_token": "<s>"}
    path = folder(sentencepiece("metaspace"), tokenizer_config__json=config)
    assert from_folder(path).encode("<s>a", bos=True) == from_folder(path).encode("<s>a")
    assert from_folder(path).encode("a", bos=True)[0] == 1
    assert not from_folder(folder(tokenizer_config__json={"bos_token": "<|begin|>"})).add_bos
    assert not from_folder(folder(sentencepiece("metaspace"), tokenizer_config__json={})).add_bos


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
IN_CONFIG = {"tokenizer_config__json": {"chat_template": "config"}}
IN_JSON = {"chat_template__json": {"chat_template": "json"}}
TEMPLATES: Iterable[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    (IN_CONFIG, "config"),
    ({"tokenizer_config__json": {"chat_template": NAMED}}, "d"),
    ({"tokenizer_config__json": {"chat_template": NAMED[:1]}}, None),
    (IN_JSON, "json"),
    (IN_CONFIG | IN_JSON, "config"),
    (IN_JSON | {"tokenizer_config__json": {"chat_template": None}}, "json"),
    (IN_CONFIG | {"chat_template__jinja": "jinja\n"}, "jinja\n"),
    (IN_JSON | {"chat_template__jinja": "jinja"}, "jinja"),
]


@pytest.mark.parametrize("files, wanted", TEMPLATES)
def test_places_of_the_chat_template(files: dict[str, Any], wanted: str | None, folder: Folder) -> None:
    """As transformers' tokenizers find it, which leave chat_template.json to processors: it is the last resort here."""
    from transformers import PreTrainedTokenizerFast

    path = folder(**files)
    assert from_folder(path).chat_template == wanted
    theirs = PreTrainedTokenizerFast.from_pretrained(path).chat_template
    assert (theirs.get("default") if isinstance(theirs, dict) else theirs) == (None if wanted == "json" else wanted)


def test_special_tokens_map_wins(folder: Folder) -> None:
    """Where the configuration lists no added tokens: transformers reads the older file last."""
    from transformers import AutoTokenizer

    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_start|>"}, "additional_special_tokens": ["x"]}
    config = {"eos_token": "<|im_end|>", "pad_token": None, "add_bos_token": True}
    config |= {"tokenizer_class": "TokenizersBackend"}
    path = folder(tokenizer_config__json=config, special_tokens_map__json=names)
    assert from_folder(path).special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_start|>"}
    assert from_folder(path).special_tokens == AutoTokenizer.from_pretrained(path).special_tokens_map


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json: not valid JSON"),
        ({"tokenizer__json": "[]"}, r"tokenizer\.json: holds"),
        ({"tokenizer__json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}}}, "not a tokenizer"),
        ({"tokenizer__json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}}, "not a tokenizer"),
        ({"tokenizer__json": {"version": "1.0", "model": {"type": "Other"}}}, "not a tokenizer"),
        ({"tokenizer_config__json": "nonsense"}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config__json": "[1]"}, r"tokenizer_config\.json: holds"),
        ({"special_tokens_map__json": "1"}, r"special_tokens_map\.json: holds"),
        ({"chat_template__json": "{"}, r"chat_template\.json: not valid JSON"),
        ({"tokenizer_config__json": {"chat_template": 3}}, "chat_template = 3"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": 3}]}}, "chat_template = 3"),
    ],
)  # fmt: skip
def test_broken_files_are_refused(files: dict[str, Any], message: str, folder: Folder) -> None:
    with pytest.raises(RingkvError, match=message) as caught:
        Tokenizer.from_folder(folder(**files))
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_utf8(folder: Folder) -> None:
    path = folder()
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(RingkvError, match=r"chat_template\.jinja: cannot be read"):
        Tokenizer.from_folder(path)


def test_the_gguf_writer_and_reader_agree(tmp_path: Path) -> None:
    """Through a file: the metadata that llama.cpp's converter writes."""
    metadata = published("deepseek-r1-qwen")[1]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-r1-qwen")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_chat_template("{{ bos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from ringkv.models.checkpoints.gguf_file import read_gguf

    tokenizer = from_gguf(read_gguf(tmp_path / "t.gguf").metadata)
    assert tokenizer.encode("Hello <think>", bos=True)[0] == tokenizer.bos_id
    assert (tokenizer.add_bos, tokenizer.chat_template) == (True, "{{ bos_token }}")
