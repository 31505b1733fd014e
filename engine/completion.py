"""What a request gives back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ringkv.engine.record import Record
from ringkv.engine.snapshot import Snapshot

UNFINISHED = ("length", "cancelled")  # the finish reasons of a text that can be gone on with


@dataclass(frozen=True)
class Completion:
    """The result of one request; ``to_dict`` is what ``--json`` prints.

    Attributes:
        text: the answer, without the token or string that ended it.
        thinking: the thought before the answer; None where the model has none.
        token_ids: every token, with the ending one.
        finish_reason: "stop", "length", "repetition", "cancelled" or "error".
        stop_reason: the id or string that ended it, or None.
        sampling: name -> {value, source}, each effective value and where it came from.
        error: {type, message} or None.
        timing: seconds in the queue, in prefill and in decode, and tokens a second of decode.
        dtype: of weights, computation and ring.
        ring: what the ring did: sizes, evictions, what was retained.
        trace: where every token went, if it was asked for; not in ``to_dict``.
        snapshot: what the request goes on from, if it was asked for and did not end in an error; not in ``to_dict``.
    """

    text: str
    thinking: str | None
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    thinking_tokens: int
    answer_tokens: int
    finish_reason: str
    stop_reason: int | str | None
    repetition: dict[str, Any] | None
    sampling: dict[str, dict[str, Any]]
    logprobs: list[dict[str, Any]] | None
    warnings: list[str]
    error: dict[str, str] | None
    timing: dict[str, float]
    sample: int
    model: str
    dtype: dict[str, str]
    backend: str
    ring: dict[str, Any]
    trace: Record | None = field(default=None, repr=False, compare=False)
    snapshot: Snapshot | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, trace=None, snapshot=None))
        del plain["trace"], plain["snapshot"]
        return plain


@dataclass(frozen=True)
class StreamEvent:
    """A piece of text as it comes. The last event of a stream carries the completion.

    Attributes:
        text: may be empty, when a token did not complete a character.
        channel: "thinking" or "answer".
        token_ids: the tokens that this event reports.
        completion: on the last event only.
        held: whether the text was held back and is shown because nothing follows; a request that goes on from here
            shows it again, or what it has become.
        snapshot: what the request goes on from after this event, where one was asked for.

    >>> StreamEvent("Blue", token_ids=[42]).channel
    'answer'
    """

    text: str
    channel: str = "answer"
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None
    held: bool = False
    snapshot: Snapshot | None = field(default=None, repr=False, compare=False)
