"""Control tokens that the files beside a ``tokenizer.json`` name, and those that are known to end a turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ringkv.errors import RingkvError
from ringkv.models.keys import read_json, refusal, short

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_TOKEN = f"a text, or an object with {', '.join(_FIELDS)}"

# The texts at which llama.cpp ends a generation (special_eog_ids in its llama-vocab.cpp).
TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>"),
)


def turn_ends(texts: Collection[str]) -> set[str]:
    """Those of ``TURN_ENDS`` that are among the texts, without what ends only a part of a turn beside the others."""
    ends = set(TURN_ENDS).intersection(texts)
    if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")
    if "<|tool_response>" in ends:
        ends.discard("</s>")
    return ends


def add_named_tokens(backend: tokenizers.Tokenizer, folder: Path) -> dict[str, str]:
    """Add the control tokens that a folder's configuration names to its tokenizer, as transformers 5 does.

    They are named in ``tokenizer_config.json``; where that has no ``added_tokens_decoder``, also in
    ``special_tokens_map.json``, which wins, and in ``added_tokens.json``.

    Returns:
        The texts of the tokens that have a name, such as ``bos_token``, by name.

    Raises:
        RingkvError: a file is broken, names something that is not a token, or gives a token another id than the
            tokenizer does.
    """
    path = folder / "tokenizer_config.json"
    config, source = optional_json(path), f"{path}: {_DECODER}"
    named, extra = _named(config, path)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if _DECODER in config:
        listed = {_id(id, source): _token(token, source) for id, token in _items(config[_DECODER], source)}
    else:
        path, source = folder / "special_tokens_map.json", str(folder / "added_tokens.json")
        more_named, more_extra = _named(optional_json(path), path)
        named, extra = named | more_named, extra + more_extra
        special = {token.content for token in (*named.values(), *extra)}
        listed = {
            _id(id, source): known.get(text) or _token(text, source, special=text in special)
            for text, id in _items(optional_json(Path(source)), source)
        }
    texts = {name: token.content for name, token in named.items() if token.content}
    added = {token.content: token for _, token in sorted(listed.items())}
    for token in (*named.values(), *extra):
        added.setdefault(token.content, known.get(token.content, token))
    for text, token in added.items():
        token.special |= text in texts.values() or (text in known and known[text].special)
    backend.add_tokens(list(added.values()))
    for id, token in listed.items():
        if token.content and (given := backend.token_to_id(token.content)) != id:
            raise RingkvError(f"{source}: {short(token.content)} = {id}: accepted is {given}, its id in tokenizer.json")
    return texts


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    return read_json(path) if path.is_file() else {}


def _named(config: Mapping[str, Any], path: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The tokens that have a name, an empty one where the file says that there is none, and the list of the others."""
    extra = config.get(_EXTRA) or config.get(_OLD_EXTRA) or []
    names = {name: config[name] for name in NAMES if name in config}
    others = {key: value for key, value in config.items() if key.endswith("_token") and _has_text(value)}
    names |= dict(sorted(others.items(), key=lambda pair: isinstance(pair[1], str)))  # as transformers gives out ids
    if isinstance(extra, Mapping):
        names, extra = names | extra, []
    elif not isinstance(extra, list):
        raise refusal(f"{path}: {_EXTRA}", extra, "a list of tokens, or an object of names and tokens")
    named = {
        name: _token("" if value is None else value, f"{path}: {name}", special=True) for name, value in names.items()
    }
    return named, [_token(value, f"{path}: {_EXTRA}", special=True) for value in extra]


def _token(value: Any, at: str, **flags: bool) -> AddedToken:
    """A token from its text, or from an object with its text and its flags, which win over the given ones."""
    if not _has_text(value):
        raise refusal(at, value, _TOKEN)
    fields = {"content": value} if isinstance(value, str) else {key: value[key] for key in _FIELDS if key in value}
    try:
        return AddedToken(**{**flags, **fields})
    except (TypeError, ValueError) as error:
        raise refusal(at, value, _TOKEN) from error


def _has_text(value: object) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _items(value: object, at: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise refusal(at, value, "an object")
    return list(value.items())


def _id(value: object, at: str) -> int:
    """An id, which is a text where it is the key of an object."""
    if type(value) is int or (isinstance(value, str) and value.isdecimal() and len(value) < 20):
        return int(value)
    raise refusal(at, value, "the id of a token")
