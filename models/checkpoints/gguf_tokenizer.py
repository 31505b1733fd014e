"""The tokenizer inside a GGUF file, as the one that Hugging Face's tokenizer.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ringkv.models.bounds import check_added
from ringkv.models.keys import Keys
from ringkv.models.special_tokens import TURN_ENDS
from ringkv.models.tokenizer import Tokenizer, refusing

# llama.cpp's token types.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _pre_tokenizer(name: str) -> list[Any]:
    if name == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    # Qwen2 and Llama 3 differ in how many digits stay together.
    digits = r"\p{N}{1,3}" if name == "llama-bpe" else r"\p{N}"
    words = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe", "deepseek-r1-qwen")


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The byte-level BPE that the metadata of a GGUF file holds; None where it holds no tokenizer.

    What the file names as the beginning or an end of a text, and what is known to end a turn, is a control token
    whatever its type entry says (as in llama.cpp, where its text is known).

    Raises:
        RingkvError: another kind of tokenizer or pre-tokenizer, or a broken vocabulary.
    """
    keys = Keys(metadata, f"{path}: ")
    if keys.raw("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    keys.choice("tokenizer.ggml.model", ("gpt2",))
    pre = keys.choice("tokenizer.ggml.pre", PRE_TOKENIZERS)
    keys.choice("tokenizer.ggml.add_space_prefix", (False,), False)
    tokens = _texts(keys, "tokenizer.ggml.tokens")
    types = keys.integers("tokenizer.ggml.token_type", (_NORMAL,) * len(tokens))
    if len(types) != len(tokens):
        raise keys.refuse("tokenizer.ggml.token_type", f"one for each of {len(tokens)} tokens")
    ids = {name: _token_id(keys, key, len(tokens)) for name, key in _NAMES.items()}
    eos_ids = gguf_eos_ids(metadata, len(tokens), path)
    # Some converters write such a token as a word, or as unused.
    control = {ids["bos_token"], *eos_ids, *(id for id, token in enumerate(tokens) if token in TURN_ENDS)}
    kinds = [_CONTROL if id in control else kind for id, kind in enumerate(types)]
    vocabulary = {token: id for id, token in enumerate(tokens) if kinds[id] != _UNUSED}
    if len(vocabulary) + kinds.count(_UNUSED) != len(tokens):
        raise keys.refuse("tokenizer.ggml.tokens", "none of them twice")
    merges: Any = [tuple(merge.split(" ")) for merge in _texts(keys, "tokenizer.ggml.merges")]
    template = keys.raw("tokenizer.chat_template", None)
    if not isinstance(template, str | None):
        raise keys.refuse("tokenizer.chat_template", "a text")

    added = [pair for pair in zip(tokens, kinds, strict=True) if pair[1] in (_CONTROL, _USER_DEFINED)]
    check_added((token for token, _ in added), f"{path}: tokenizer.ggml.tokens")
    with refusing(f"{path}: not a tokenizer"):
        # The converter writes no ignore_merges; Llama 3 takes a word that is a token before it looks at merges.
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizer(pre))
        backend.decoder = decoders.ByteLevel()
        if pre in ("qwen2", "deepseek-r1-qwen"):
            backend.normalizer = normalizers.NFC()
        backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in added])
    return Tokenizer(
        backend,
        special_tokens={name: tokens[id] for name, id in ids.items() if id is not None},
        chat_template=template,
        add_bos=keys.flag("tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
        eos_ids=eos_ids,
    )


def gguf_eos_ids(metadata: Mapping[str, Any], size: int, path: Path) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, each once; ``size`` is that of the vocabulary."""
    keys = Keys(metadata, f"{path}: ")
    ids = (_token_id(keys, key, size) for key in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def _token_id(keys: Keys, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return keys.integer(key, low=0, high=size - 1) if key in keys else None


def _texts(keys: Keys, key: str) -> list[str]:
    value = keys.raw(key)
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise keys.refuse(key, "a list of texts")
    return value
