"""One request: what was asked, and the host's account of what it has generated. No tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringkv.engine.repetition import Repetition, RepetitionDetector
from ringkv.engine.sampling import Sampling
from ringkv.engine.stops import StopStrings
from ringkv.engine.text import IncrementalDecoder

ANSWER, THINKING = "answer", "thinking"


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
        inside_thought: whether the prompt ends inside an open thought.
        closing_message: ids that are written before a thought is closed by force.
        position_limit: max_position_embeddings; going past it is a warning.
        warnings: what the result must say from the start.
    """

    index: int
    ids: list[int]
    sampling: Sampling
    seed: int
    sample: int = 0
    pin: int = 0
    stop_ids: frozenset[int] = frozenset()
    inside_thought: bool = False
    closing_message: Sequence[int] = ()
    position_limit: int = 2**31
    warnings: list[str] = field(default_factory=list)
    created: float = field(default_factory=time.monotonic)


class Generation:
    """The state of a request that has a lane.

    Args:
        request: what was asked.
        lane: where it runs.
        decoder: turns its tokens into text; None where the engine has no tokenizer.
    """

    def __init__(self, request: Request, lane: int, decoder: IncrementalDecoder | None) -> None:
        values = request.sampling.values
        self.request, self.lane, self.decoder = request, lane, decoder
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.texts: dict[str, str] = {ANSWER: "", THINKING: ""}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: dict[str, str] | None = None
        self.repetition: Repetition | None = None
        self.close_thought = False  # asked of the device; the loop passes it on
        self.retained: list[int] = []
        self.figures: dict[str, Any] = {"kept": 0, "evictions": 0, "evictions_per_layer": [], "peak_slots": 0}
        self.started = self.first = time.monotonic()
        self._stops = StopStrings(values["stop"])
        self._detector = RepetitionDetector(values["min_repeat_count"], values["min_repeat_span"])

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.request.sampling.values["max_tokens"] - len(self.tokens)

    def push(self, token: int, logprob: dict[str, Any] | None = None) -> list[tuple[str, str]]:
        """Take the next token; sets ``finish_reason`` when it is the last.

        Args:
            token: -1 where the logits were not finite.
            logprob: what is reported of it, if anything.

        Returns:
            (channel, text) pieces that may be shown now.
        """
        if not self.tokens:
            self.first = time.monotonic()
        if token < 0:
            self.fail("NonFiniteLogits", f"the logits after {len(self.tokens)} tokens hold NaN or infinity")
            return self.flush()
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
            return self.flush()
        text, hit = self._stops.push(self.decoder.push(token) if self.decoder else "")
        pieces = self._split(text)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
            return pieces
        self._watch(token)
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = "length"
        return pieces if self.finish_reason is None else pieces + self.flush()

    def flush(self) -> list[tuple[str, str]]:
        """What was held back, when nothing follows."""
        rest = self.decoder.flush() if self.decoder else ""
        text, hit = self._stops.push(rest)
        if hit is not None and self.stop_reason is None:
            self.finish_reason, self.stop_reason = "stop", hit
        return self._split(text + self._stops.flush())

    def cancel(self) -> None:
        """End the request where it is."""
        self.finish_reason = "cancelled"

    def fail(self, kind: str, message: str) -> None:
        """End the request with an error."""
        self.finish_reason, self.error = "error", {"type": kind, "message": message}

    def warnings(self) -> list[str]:
        """What the result must say beside its text."""
        limit, seen = self.request.position_limit, len(self.request.ids) + len(self.tokens)
        past = f"{seen} tokens were seen; the model was made for {limit} (max_position_embeddings)"
        return [*self.request.warnings, *([past] if seen > limit else [])]

    def timing(self) -> dict[str, float]:
        """Seconds, and tokens a second of decode."""
        decode = time.monotonic() - self.first
        return {
            "queue_s": self.started - self.request.created,
            "prefill_s": self.first - self.started,
            "decode_s": decode,
            "tokens_per_s": max(0, len(self.tokens) - 1) / decode if decode else 0.0,
        }

    def _split(self, text: str) -> list[tuple[str, str]]:
        pieces = [(ANSWER, text)] if text else []
        for channel, piece in pieces:
            self.texts[channel] += piece
        return pieces

    def _watch(self, token: int) -> None:
        """Look for a loop, and do what the request wants done about it."""
        found = self._detector.push(token)
        if found is None:
            return
        self.repetition = self.repetition or found
        if self.request.sampling.values["on_repetition"] != "ignore":
            self.finish_reason = "repetition"
