"""Options that change nothing. One rule holds for all: the request runs, and its result names each and says why."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ringkv.engine.config import SamplingParams
from ringkv.engine.sampling.values import Sampling
from ringkv.engine.text.encoding import Conversation
from ringkv.engine.text.thoughts import ThoughtTags

_FILTERS = {"top_p": 1, "top_k": 0, "min_p": 0}  # each with the value that leaves all tokens in


def idle_options(
    params: SamplingParams,
    sampling: Sampling,
    tags: ThoughtTags | None,
    conversation: Conversation | None,
    inside: bool,
    stop_ids: Collection[int],
) -> list[str]:
    """One line for each option of a request that has no effect on its tokens or its text.

    Args:
        params: what the user gave.
        sampling: the effective values.
        tags: of the model's thoughts.
        conversation: None where no chat template renders the prompt (raw mode, token ids).
        inside: whether the prompt ends inside a thought.
        stop_ids: the tokens that end the text.
    """
    reasons = dict(_reasons(sampling, tags, conversation, inside, stop_ids))
    given = [name for name in reasons if sampling.sources[name] == "user"]
    lines = [f"{name} = {getattr(params, name)!r} does nothing: {reasons[name]}" for name in given]
    if conversation is not None and conversation.leaves_out_system():
        lines.append("the system message does nothing: the chat template does not write it")
    return lines


def fixed_seeds(*seeds: int | None) -> list[str]:
    """A line for a negative seed, with which other programs ask for a random one."""
    negative = [seed for seed in seeds if seed is not None and seed < 0][:1]
    return [f"seed = {seed} is a fixed seed, as every int is: leave it out to have one drawn" for seed in negative]


def _reasons(
    sampling: Sampling,
    tags: ThoughtTags | None,
    conversation: Conversation | None,
    inside: bool,
    stop_ids: Collection[int],
) -> Iterator[tuple[str, str]]:
    values = sampling.values
    if conversation is None and not (values["thinking"] is True and inside):
        yield "thinking", "no chat template reads it (raw mode, or token ids)"
    elif conversation is not None and "enable_thinking" not in conversation.template.variables:
        yield "thinking", "the chat template does not read enable_thinking"
    closing = values["on_repetition"] == "close_thought"
    if tags is None or tags.ids is None:
        no_thought = "the model has no thought whose tags are single tokens"
        yield "thinking_message", no_thought
        if closing:
            yield "on_repetition", f"{no_thought}, so a loop ends the text"
    elif not closing and values["max_thinking_tokens"] is None:
        yield "thinking_message", "only max_thinking_tokens, or on_repetition = 'close_thought', closes a thought"
    if not stop_ids:
        yield "min_tokens", "no token ends the text"
    if sampling.greedy:
        for name, off in _FILTERS.items():
            if values[name] != off:
                yield name, "at temperature 0 the likeliest token is drawn"
