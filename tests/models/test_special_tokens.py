"""Control tokens that files name beside the tokenizer, or a GGUF's keys: transformers' ids, llama.cpp's turn ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ringkv.bench.llama import installed
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.gguf_file import read_gguf
from ringkv.models.checkpoints.gguf_tokenizer import gguf_tokenizer
from ringkv.models.special_tokens import TURN_ENDS, turn_ends
from ringkv.models.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
START, END = len(ALPHABET), len(ALPHABET) + 1
TEXT = "<|im_start|>user\nHi  <|im_end|>\n<|im_start|> assistant\n yo <|im_end|>  <image> a<|endoftext|>"
WITH_TYPE = {"__type": "AddedToken"}


def saved(content: str, **flags: Any) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content} | plain | flags


def write(path: Path, files: dict[str, Any], tokens: Sequence[AddedToken] = ()) -> Path:
    """A folder whose tokenizer.json has single bytes and ``tokens``; ``files`` by name without .json."""
    backend = tokenizers.Tokenizer(models.BPE({text: id for id, text in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if tokens:
        backend.add_tokens(list(tokens))
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend"} | files.get("tokenizer_config", {})
    for name, content in (files | {"tokenizer_config": config}).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def read(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer is not None
    return tokenizer


DECODER = {str(START): saved("<|im_start|>"), str(END): saved("<|im_end|>")}
BOTH = ["<|im_start|>", "<|im_end|>"]
NAMED: dict[str, tuple[dict[str, Any], list[AddedToken]]] = {
    "decoder": ({"tokenizer_config": {"added_tokens_decoder": DECODER}}, []),
    "decoder in any order": (
        {"tokenizer_config": {"added_tokens_decoder": dict(reversed(DECODER.items())), "eos_token": "<|im_end|>"}}, []
    ),
    "decoder, the map is not read": (
        {
            "tokenizer_config": {"added_tokens_decoder": DECODER, "eos_token": "<|im_end|>"},
            "special_tokens_map": {"eos_token": "<image>", "pad_token": "<pad>"},
            "added_tokens": {"<image>": 4},
        },
        [],
    ),
    "decoder without flags": (
        {"tokenizer_config": {"added_tokens_decoder": {str(START): {"content": "<|im_start|>"}}}}, []
    ),
    "decoder with other flags": (
        {
            "tokenizer_config": {
                "added_tokens_decoder": {
                    str(START): saved("<|im_start|>", lstrip=True, rstrip=True, special=False),
                    str(END): saved("<|im_end|>", lstrip=True),
                }
            }
        },
        [AddedToken("<|im_start|>", special=True, normalized=False)],
    ),
    "added_tokens.json": ({"added_tokens": {"<|im_end|>": END, "<|im_start|>": START}}, []),
    "added_tokens.json and a name": (
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "added_tokens": {"<|im_start|>": START, "<|im_end|>": END}},
        [],
    ),
    "the map wins": (
        {
            "tokenizer_config": {"eos_token": "<|endoftext|>", "pad_token": "<pad>"},
            "special_tokens_map": {
                "eos_token": saved("<|im_start|>", rstrip=True),
                "pad_token": None,
                "additional_special_tokens": ["<|im_end|>", "x"],
            },
        },
        [],
    ),
    "extra, a list": ({"tokenizer_config": {"extra_special_tokens": BOTH}}, []),
    "extra, an object": (
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>", "a": "<|im_end|>"}}}, []
    ),
    "extra, as it was called": (
        {"tokenizer_config": {"additional_special_tokens": ["<|im_start|>", WITH_TYPE | saved("<|im_end|>")]}}, []
    ),
    "extra, an object, and a list as it was called": (
        {
            "tokenizer_config": {
                "extra_special_tokens": {"image_token": "<image>"},
                "additional_special_tokens": ["<|im_end|>"],
            }
        },
        [],
    ),
    "extra, as it was called in both places": (
        {
            "tokenizer_config": {"additional_special_tokens": ["<|im_end|>"]},
            "special_tokens_map": {"additional_special_tokens": ["<|im_start|>"]},
        },
        [],
    ),
    "one text twice, with other flags": (
        {
            "special_tokens_map": {
                "eos_token": saved("<|im_end|>", lstrip=True),
                "additional_special_tokens": ["<|im_end|>", "<|im_start|>"],
            }
        },
        [],
    ),
    "names in both places": (
        {
            "tokenizer_config": {"image_token": "<image>", "eos_token": "<|im_end|>"},
            "special_tokens_map": {"image_token": "<|im_start|>", "audio_token": "<|endoftext|>"},
        },
        [],
    ),
    "extra, in both places": (
        {
            "tokenizer_config": {"extra_special_tokens": ["<|im_end|>"]},
            "special_tokens_map": {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        },
        [],
    ),
    "names": (
        {
            "tokenizer_config": {
                "image_token": "<image>",
                "eos_token": "<|im_end|>",
                "bos_token": WITH_TYPE | saved("<|im_start|>", lstrip=True),
                "audio_token": WITH_TYPE | saved("<audio>"),
                "video_token": saved("<video>"),
                "add_bos_token": True,
            }
        },
        [],
    ),
    "names of the model": (
        {"tokenizer_config": {"model_specific_special_tokens": {"image_token": "<image>"}, "eos_token": "<|im_end|>"}},
        [],
    ),
    "names of the model beside others, which win": (
        {
            "tokenizer_config": {"model_specific_special_tokens": {"a": "<|im_end|>"}, "image_token": "<image>"},
            "special_tokens_map": {"extra_special_tokens": {"b": "<|im_start|>"}},
        },
        [],
    ),
    "names of the model in both places": (
        {
            "tokenizer_config": {"model_specific_special_tokens": {"a": WITH_TYPE | saved("<|im_end|>", lstrip=True)}},
            "special_tokens_map": {"extra_special_tokens": {"b": "<|im_start|>"}},
        },
        [],
    ),
    "a word is the name": ({"tokenizer_config": {"eos_token": "a"}}, []),
    "a name of a token that is not special": (
        {"tokenizer_config": {"eos_token": "<|im_end|>"}}, [AddedToken("<|im_end|>", normalized=False, rstrip=True)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path, *NAMED[name])
    ours, theirs = read(path), AutoTokenizer.from_pretrained(path)
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.size == len(theirs)
    every = range(START, ours.size)
    assert [ours.decode([id]) for id in every] == [theirs.decode([id], skip_special_tokens=True) for id in every]


def test_in_plain_text_named_tokens_are_text(tmp_path: Path) -> None:
    named = read(write(tmp_path, NAMED["decoder"][0]))
    assert named.encode(TEXT, control=False) == read(write(tmp_path, {})).encode(TEXT)


DECODERS: list[tuple[Any, str]] = [
    ({str(END): saved("<x>")}, ": '<x>' = 257: accepted is 256"),
    ({"1": saved("a")}, ": 'a' = 1: accepted is"),
    ({"-1": saved("a")}, " = '-1'"),
    ({"9" * 5000: saved("a")}, " = '999"),
    ([saved("a")], " = [{"),
    ({"1": {"content": 3}}, " = {'content': 3}"),
    ({"1": saved("a", lstrip=0)}, " = {"),
    ({"1": saved("\ud800")}, " = {"),
]
BROKEN: list[tuple[dict[str, Any], str]] = [
    *(({"tokenizer_config": {"added_tokens_decoder": d}}, f"added_tokens_decoder{told}") for d, told in DECODERS),
    ({"tokenizer_config": {"eos_token": 5}}, "tokenizer_config.json: eos_token = 5: accepted is a text, or"),
    ({"tokenizer_config": {"eos_token": ["</s>"]}}, "eos_token = ['</s>']"),
    ({"tokenizer_config": {"eos_token": {"content": None}}}, "eos_token = {'content': None}"),
    ({"tokenizer_config": {"extra_special_tokens": "<x>"}}, "extra_special_tokens = '<x>'"),
    ({"tokenizer_config": {"additional_special_tokens": [3]}}, "extra_special_tokens = 3"),
    (
        {"tokenizer_config": {"model_specific_special_tokens": [3]}},
        "model_specific_special_tokens = [3]: accepted is an",
    ),
    ({"tokenizer_config": {"model_specific_special_tokens": {"a_token": 3}}}, "tokenizer_config.json: a_token = 3"),
    ({"special_tokens_map": {"bos_token": 1.5}}, "special_tokens_map.json: bos_token = 1.5"),
    ({"added_tokens": {"<x>": "y"}}, "added_tokens.json = 'y': accepted is the id of a token"),
    ({"added_tokens": {"<x>": [1]}}, "added_tokens.json = [1]"),
    ({"added_tokens": {"<x>": 1 << 40}}, "added_tokens.json: '<x>' = 1099511627776: accepted is 256"),
    ({"added_tokens": []}, "added_tokens.json: holds"),
]


@pytest.mark.parametrize(("files", "told"), BROKEN)
def test_what_is_no_token_is_refused(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(RingkvError) as caught:
        read(write(tmp_path, files))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_name_is_no_token(tmp_path: Path) -> None:
    tokenizer = read(write(tmp_path, {"tokenizer_config": {"eos_token": None, "pad_token": "", "mask_token_id": 4}}))
    assert (tokenizer.special_tokens, tokenizer.eos_ids, tokenizer.control_tokens) == ({}, (), {})


KINDS = {"word": 1, "control": 3, "user defined": 4, "unused": 5}


def gguf_file(path: Path, control: Sequence[str], kind: int, **ids: int) -> Path:
    """A file with nothing but a vocabulary of single bytes and ``control``, of which ``ids`` are named."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*ALPHABET, *control, "ab"])
    writer.add_token_types([1] * len(ALPHABET) + [kind] * len(control) + [1])
    writer.add_token_merges(["a b"])
    for name, id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_gguf(path: Path) -> Tokenizer:
    tokenizer = gguf_tokenizer(read_gguf(path).metadata, path)
    assert tokenizer is not None
    return tokenizer


def llama_cpp_says(path: Path) -> tuple[set[int], set[int]]:
    """The ids at which llama.cpp ends a generation, and its control tokens."""
    import llama_cpp

    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    assert model is not None
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    every = range(llama_cpp.llama_vocab_n_tokens(vocabulary))
    ends = {id for id in every if llama_cpp.llama_vocab_is_eog(vocabulary, id)}
    control = {id for id in every if llama_cpp.llama_vocab_is_control(vocabulary, id)}
    llama_cpp.llama_model_free(model)
    return ends, control


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom"])
def test_what_a_gguf_names_is_a_control_token(key: str, kind: str, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "t.gguf", ["<a>", "<b>"], KINDS[kind], **{key: START})
    tokenizer = from_gguf(path)
    assert tokenizer.control_tokens["<a>"] == START
    assert START in tokenizer.special_ids
    assert tokenizer.encode("x<a>y") == [*tokenizer.encode("x"), START, *tokenizer.encode("y")]
    assert START not in tokenizer.encode("x<a>y", control=False)
    assert tokenizer.eos_ids == (() if key == "bos" else (START,))
    # Its neighbour is what its type says.
    assert ("<b>" in tokenizer.control_tokens) == (kind in ("control", "user defined"))
    assert tokenizer.holes == ({END} if kind == "unused" else set())


COMPANY = [
    *([text] for text in TURN_ENDS),
    ["<|im_end|>", "<|endoftext|>", "</s>"],
    *itertools.combinations(["<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"], 2),
    *itertools.combinations(["<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"], 3),
    ["<|tool_response>", "</s>", "<eos>"],
]


@pytest.mark.parametrize("kind", KINDS)
def test_turn_ends_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    """As of llama-cpp-python 0.3.36, which is asked where it is installed."""
    for number, texts in enumerate(COMPANY):
        path = gguf_file(tmp_path / f"{number}.gguf", ["<x>", *texts], KINDS[kind], eos=START)
        tokenizer = from_gguf(path)
        ends = turn_ends(tokenizer.control_tokens)
        assert set(texts) <= tokenizer.control_tokens.keys()
        assert set(texts) - ends <= {"<|end|>", "</s>"}
        if installed():
            wanted, control = llama_cpp_says(path)
            assert {START} | {tokenizer.control_tokens[text] for text in ends} == wanted, texts
            assert control - {START} <= tokenizer.special_ids


@pytest.mark.parametrize(
    ("texts", "gone"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>"),
        (["<|end|>", "<|calls|>", "<|flush|>"], "<|end|>"),
        (["<|end|>", "<|call|>"], None),
        (["<|end|>", "<|return|>", "<|flush|>"], None),
        (["</s>", "<|tool_response>"], "</s>"),
    ],
)
def test_what_ends_a_part_of_a_turn_only(texts: list[str], gone: str | None) -> None:
    assert turn_ends([*texts, "<|im_start|>"]) == set(texts) - {gone}
