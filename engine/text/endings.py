"""The tokens that end what a model says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ringkv.engine.text.templates import ChatTemplate
from ringkv.errors import RingkvError
from ringkv.models.keys import Keys
from ringkv.models.special_tokens import turn_ends
from ringkv.models.tokenizer import Tokenizer

_ANSWER = "Seven past nine."
_QUESTION = {"role": "user", "content": "What time is it?"}
_TURNS = [_QUESTION, {"role": "assistant", "content": _ANSWER}, _QUESTION]


def ending_tokens(
    named: Sequence[int],
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> dict[int, str]:
    """The ids at which a text ends, in order, each with its token's text, which is empty without a tokenizer.

    They are those that the configuration, ``generation_config`` and the tokenizer name. Where ``generation_config``
    names none, there are also those that the chat template writes after an answer, and the control tokens that are
    known to end a turn (see ``turn_ends``).

    Args:
        named: ids that the model's configuration names.

    Raises:
        RingkvError: ``eos_token_id`` of generation_config is neither an id nor a list of ids.
    """
    theirs = Keys(generation_config, "generation_config.json: ").token_ids("eos_token_id")
    ids = {*named, *theirs}
    if tokenizer is None:
        return dict.fromkeys(sorted(ids), "")
    control = tokenizer.control_tokens
    ids.update(tokenizer.eos_ids)
    if not theirs:
        ids.update(control[text] for text in turn_ends(control) | _written_after(template, control))
    texts = {id: text for text, id in control.items()}
    return {id: texts.get(id) or tokenizer.token_bytes(id).decode(errors="replace") for id in sorted(ids)}


def _written_after(template: ChatTemplate | None, control_tokens: Collection[str]) -> set[str]:
    """The control tokens that a chat template writes after an answer, at the end and before the next question."""
    found: set[str] = set()
    if template is None:
        return found
    for messages in (_TURNS[:2], _TURNS):
        try:
            _, answer, after = template.render(messages, add_generation_prompt=False).rpartition(_ANSWER)
        except RingkvError:
            continue
        starts = [text for text in control_tokens if answer and after.lstrip().startswith(text)]
        found.update(sorted(starts, key=len)[-1:])
    return found
