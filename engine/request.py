"""One request: what was asked, and the host's account of what it has generated. No tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ringkv.engine.sampling import Sampling
from ringkv.engine.text import IncrementalDecoder


@dataclass
class Request:
    """A prompt that is ready to be read into a lane.

    Attributes:
        index: its place among the requests of one call.
        ids: the prompt's tokens, at least one.
        sampling: effective values.
        seed: the noise key, 64 bits.
        sample: which of n samples this is.
        pin: the end of the pinned span, which starts at 0.
        stop_ids: tokens that end the text.
        position_limit: max_position_embeddings; going past it is a warning.
    """

    index: int
    ids: list[int]
    sampling: Sampling
    seed: int
    sample: int = 0
    pin: int = 0
    stop_ids: frozenset[int] = frozenset()
    position_limit: int = 2**31
    created: float = field(default_factory=time.monotonic)


class Generation:
    """The state of a request that has a lane.

    Args:
        request: what was asked.
        lane: where it runs.
        decoder: turns its tokens into text; None where the engine has no tokenizer.
    """

    def __init__(self, request: Request, lane: int, decoder: IncrementalDecoder | None) -> None:
        self.request, self.lane, self.decoder = request, lane, decoder
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: dict[str, str] | None = None
        self.retained: list[int] = []
        self.started = self.first = time.monotonic()

    def push(self, token: int) -> str:
        """Take the next token; returns the text that it completes. Sets ``finish_reason`` when it is the last."""
        if not self.tokens:
            self.first = time.monotonic()
        if token < 0:
            self.fail("NonFiniteLogits", f"the logits after {len(self.tokens)} tokens hold NaN or infinity")
            return self._text("", last=True)
        self.tokens.append(token)
        if token in self.request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
            return self._text("", last=True)
        piece = self.decoder.push(token) if self.decoder else ""
        if len(self.tokens) >= self.request.sampling.values["max_tokens"]:
            self.finish_reason = "length"
        return self._text(piece, last=self.finish_reason is not None)

    def cancel(self) -> None:
        """End the request where it is."""
        self.finish_reason = "cancelled"
        self._text("", last=True)

    def fail(self, kind: str, message: str) -> None:
        """End the request with an error."""
        self.finish_reason, self.error = "error", {"type": kind, "message": message}

    def warnings(self) -> list[str]:
        """What the result must say beside its text."""
        limit, seen = self.request.position_limit, len(self.request.ids) + len(self.tokens)
        if seen <= limit:
            return []
        return [f"{seen} tokens were seen; the model was made for {limit} (max_position_embeddings)"]

    def timing(self) -> dict[str, float]:
        """Seconds, and tokens a second of decode."""
        decode = time.monotonic() - self.first
        return {
            "queue_s": self.started - self.request.created,
            "prefill_s": self.first - self.started,
            "decode_s": decode,
            "tokens_per_s": max(0, len(self.tokens) - 1) / decode if decode else 0.0,
        }

    def counts(self) -> dict[str, Any]:
        """The token counts of the result."""
        return {
            "prompt_tokens": len(self.request.ids),
            "completion_tokens": len(self.tokens),
            "thinking_tokens": 0,
            "answer_tokens": len(self.tokens),
        }

    def _text(self, piece: str, last: bool) -> str:
        if last and self.decoder:
            piece += self.decoder.flush()
        self.pieces.append(piece)
        return piece
