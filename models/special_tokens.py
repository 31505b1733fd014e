"""Control tokens that the files beside a ``tokenizer.json`` name, and those that are known to end a turn."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ringkv.errors import RingkvError
from ringkv.models.bounds import check_added
from ringkv.models.keys import read_json, refusal, short

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONFIG, _MAP, _IDS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER, _EXTRA, _OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_SPECIFIC = "model_specific_special_tokens"
_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_TOKEN = f"a text, or an object with {', '.join(_FIELDS)}"

# The texts at which llama.cpp ends a generation (special_eog_ids in its llama-vocab.cpp).
TURN_ENDS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>"),
    )
)


def turn_ends(texts: Collection[str]) -> set[str]:
    """Those of ``TURN_ENDS`` that are among the texts, without what ends only a part of a turn beside the others."""
    ends = set(TURN_ENDS.intersection(texts))
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
    config, known = optional_json(folder / _CONFIG), backend.get_added_tokens_decoder()
    if _DECODER in config:
        named, extra = _named(config, {}, folder)
        source = f"{folder / _CONFIG}: {_DECODER}"
        listed = [(_id(id, source), _token(token, source)) for id, token in _items(config[_DECODER], source)]
        again = dict(listed)
    else:
        named, extra = _named(config, optional_json(folder / _MAP), folder)
        special = {token.content for token in (*named.values(), *extra)}
        source = str(folder / _IDS)
        listed = [
            (_id(id, source), _token(text, source, special=text in special))
            for text, id in optional_json(folder / _IDS).items()
        ]
        again = dict(listed) | known
    there = {token.content for token in (*known.values(), *again.values())}
    added = [token for _, token in sorted(again.items(), key=lambda pair: pair[0])]
    added += [token for token in (*named.values(), *extra) if token.content not in there]
    texts = {name: token.content for name, token in named.items() if token.content}
    special = {*texts.values(), *(token.content for token in known.values() if token.special)}
    for token in added:
        token.special |= token.content in special
    check_added((token.content for token in added), f"{folder}: tokens that are named beside tokenizer.json")
    backend.add_tokens(added)
    for id, token in listed:
        if token.content and (given := backend.token_to_id(token.content)) != id:
            raise RingkvError(f"{source}: {short(token.content)} = {id}: accepted is {given}, its id in tokenizer.json")
    return texts


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    return read_json(path) if path.is_file() else {}


def _named(
    config: dict[str, Any], more: dict[str, Any], folder: Path
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The tokens that have a name, empty ones where there is none, and the list of the others.

    Both files are merged as transformers merges them, and are in the order in which it gives out ids.

    Args:
        config: of ``tokenizer_config.json``; both are changed.
        more: of ``special_tokens_map.json``, if that is read.
    """
    if config.get(_OLD_EXTRA) and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_OLD_EXTRA)
    last = {key: value for key, value in config.items() if _is_other_name(key, value) and isinstance(value, str)}
    for file in (config, more):
        last |= file.pop(_EXTRA) if isinstance(file.get(_EXTRA), dict) else {}
        last = last or dict(_items(file.get(_SPECIFIC) or {}, f"{folder / _CONFIG}: {_SPECIFIC}"))
    if isinstance(config.get(_EXTRA), list) and isinstance(more.get(_EXTRA), list):
        more[_EXTRA] = config[_EXTRA] + more[_EXTRA]
    both = config | more
    values = {key: both[key] for key in NAMES if key in both}
    typed = {key for key, value in config.items() if isinstance(value, dict) and value.get("__type") == "AddedToken"}
    values |= {key: both[key] for key in both if _is_other_name(key, both[key]) and (key in more or key in typed)}
    values |= last
    extra = both.get(_EXTRA, both.get(_OLD_EXTRA)) or []

    def token(key: str, value: Any) -> AddedToken:
        return _token(value, f"{folder / (_MAP if key in more else _CONFIG)}: {key}", special=True)

    if not isinstance(extra, list):
        raise refusal(f"{folder / _CONFIG}: {_EXTRA}", extra, "a list of tokens, or an object of names and tokens")
    named = {key: token(key, "" if value is None else value) for key, value in values.items()}
    return named, [token(_EXTRA, value) for value in extra]


def _is_other_name(key: str, value: object) -> bool:
    return key.endswith("_token") and key not in NAMES and _has_text(value)


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
