"""One request: what was asked, and the host's account of what it has generated. No tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringkv.engine.config import SamplingParams
from ringkv.engine.sampling.values import Sampling
from ringkv.engine.snapshot import Snapshot
from ringkv.engine.text.encoding import IncrementalDecoder
from ringkv.engine.text.repetition import Repetition, RepetitionDetector
from ringkv.engine.text.stops import StopStrings
from ringkv.engine.text.thoughts import ANSWER, THINKING, ThoughtSplitter, ThoughtTags


@dataclass(frozen=True)
class Past:
    """What a request has behind it when it gets a lane: where it goes on from, and its answer so far.

    Attributes:
        snapshot: holds the lane.
        feed: tokens that are read before one is drawn; with none, the last of ``tokens`` is read by the next step.
        changed: whether its params, or what was put in, are not those of the snapshot.
        tokens, forced, passed, logprobs: as of ``Snapshot``, with what was put in.
    """

    snapshot: Snapshot
    feed: Sequence[int] = ()
    changed: bool = False
    tokens: Sequence[int] = ()
    forced: Sequence[int] = ()
    passed: Sequence[int] = ()
    logprobs: Sequence[dict[str, Any]] = ()


@dataclass
class Request:
    """A prompt that is ready to be read into a lane.

    Attributes:
        index: its place among the requests of one call.
        ids: the prompt's tokens, at least one.
        params: what was asked for.
        sampling: effective values.
        seed: the noise key, 64 bits.
        sample: which of n samples this is.
        pin: the end of the pinned span, which starts at 0.
        stop_ids: tokens that end the text.
        tags: of the model's thoughts; None where it has none.
        inside_thought: whether the prompt ends inside an open thought.
        closing_message: ids that are written before a thought is closed by force.
        position_limit: max_position_embeddings; going past it is a warning.
        warnings: those of the result that are known before it runs.
        tail: see ``Snapshot``.
        past: None where its prompt is still to be read.
        reads: it ends once its prompt is read.
    """

    index: int
    ids: list[int]
    params: SamplingParams
    sampling: Sampling
    seed: int
    sample: int = 0
    pin: int = 0
    stop_ids: frozenset[int] = frozenset()
    tags: ThoughtTags | None = None
    inside_thought: bool = False
    closing_message: Sequence[int] = ()
    position_limit: int = 2**31
    warnings: list[str] = field(default_factory=list)
    tail: str = "answer"
    past: Past | None = None
    reads: bool = False
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
        self.forced: list[int] = []  # places in tokens
        self.passed: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.flushed = 0  # pieces that were shown last, because nothing follows
        self.texts: dict[str, str] = {ANSWER: "", THINKING: ""}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: dict[str, str] | None = None
        self._found: Repetition | None = None
        self.close_thought = False  # asked of the device; the loop passes it on
        self.retained: list[int] = []
        self.figures: dict[str, Any] = {"kept": 0, "evictions": 0, "evictions_per_layer": [], "peak_slots": 0}
        self.started = self.first = time.monotonic()
        self._stops = StopStrings(values["stop"], decoder.tokenizer.control_tokens if decoder else ())
        self._detector = self._new_detector()
        self._splitter = ThoughtSplitter(request.tags, request.inside_thought)
        if request.past is not None:
            self._replay(request.past)
        self._before = len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return int(self.request.sampling.values["max_tokens"]) - len(self.tokens)

    @property
    def seen(self) -> int:
        """Tokens that the ring has read for this request; the last one drawn is not among them."""
        return len(self.request.ids) + max(0, len(self.tokens) - 1)

    @property
    def channel(self) -> str:
        """Where the text is now: "thinking" or "answer"."""
        return self._splitter.channel

    @property
    def phase(self) -> int:
        """BEFORE, INSIDE or AFTER the thought."""
        return self._splitter.phase

    @property
    def repetition(self) -> Repetition | None:
        """The loop that was found last, with the count that it reached; None if there was none."""
        return self._detector.last or self._found

    def push(self, token: int, forced: bool = False, logprob: dict[str, Any] | None = None) -> list[tuple[str, str]]:
        """Take the next token; sets ``finish_reason`` when it is the last.

        Args:
            token: -1 where the logits were not finite.
            forced: whether it closes a thought, or belongs to the message that does.
            logprob: what is reported of it, if anything.

        Returns:
            (channel, text) pieces that may be shown now.
        """
        if len(self.tokens) == self._before:
            self.first = time.monotonic()
        if token < 0:
            self.fail("NonFiniteLogits", f"the logits after {len(self.tokens)} tokens hold NaN or infinity")
            return self.flush()
        self.tokens.append(token)
        if forced:
            self.forced.append(len(self.tokens) - 1)
        if logprob is not None:
            self.logprobs.append(logprob)
        text, hit = self._stops.push(*self._read(token, forced))
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
            return self._keep(self._splitter.flush(len(text)))
        pieces = self._keep(self._splitter.show(len(text)))
        if token in self.request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif not forced:
            self._watch(token)
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = "length"
        return pieces if self.finish_reason is None else pieces + self.flush()

    def flush(self) -> list[tuple[str, str]]:
        """What was held back, when nothing follows."""
        rest = self.decoder.flush() if self.decoder else ""
        self._splitter.push(None, rest, counted=False)
        text, hit = self._stops.push(rest)
        if hit is not None and self.stop_reason is None:
            self.finish_reason, self.stop_reason = "stop", hit
        pieces = self._keep(self._splitter.flush(len(text + self._stops.flush())))
        self.flushed = len(pieces)
        return pieces

    def cancel(self) -> None:
        """End the request where it is."""
        self.finish_reason = "cancelled"

    def fail(self, kind: str, message: str) -> None:
        """End the request with an error."""
        self.finish_reason, self.error = "error", {"type": kind, "message": message}

    def warnings(self) -> list[str]:
        """The warnings of the result."""
        limit, seen = self.request.position_limit, len(self.request.ids) + len(self.tokens)
        past = f"{seen} tokens were seen; the model was made for {limit} (max_position_embeddings)"
        open_thought = "it ended inside the thought: there is no answer"
        unanswered = self.channel == THINKING and self.error is None
        said = [*self.request.sampling.warnings, *self.request.warnings]
        return [*said, *([past] if seen > limit else []), *([open_thought] if unanswered else [])]

    def counts(self) -> tuple[int, int]:
        """Tokens of the thought and of the answer, without tags and closing messages."""
        return self._splitter.thinking_tokens, self._splitter.answer_tokens

    def timing(self) -> dict[str, float]:
        """Seconds, and tokens a second of decode."""
        decode = time.monotonic() - self.first
        return {
            "queue_s": self.started - self.request.created,
            "prefill_s": self.first - self.started,
            "decode_s": decode,
            "tokens_per_s": max(0, len(self.tokens) - self._before - 1) / decode if decode else 0.0,
        }

    def _replay(self, past: Past) -> None:
        """Take the answer so far through all that looks at its tokens; only at its last one may it have ended."""
        self._before, forced, passed = -1, {*past.forced}, {*past.passed}
        for place, token in enumerate(past.tokens):
            if self.finish_reason is not None:
                if place - 1 not in passed:
                    why = f"the answer of the snapshot would have ended by {self.finish_reason} after {place} tokens"
                    self.fail("RingkvError", f"params: with these {why} of {len(past.tokens)}")
                    return
                self.passed.append(place - 1)
                self.finish_reason = self.stop_reason = None
            self.push(token, place in forced)
            self.close_thought = False  # the steering has heard of it
        if past.feed:  # what comes now is another text
            if self.finish_reason is not None:
                self.passed.append(len(past.tokens) - 1)
            self.finish_reason = self.stop_reason = None
        self.logprobs = list(past.logprobs)

    def _read(self, token: int, forced: bool) -> tuple[str, bool]:
        """The text of a token, and whether it is shown.

        Special tokens and those that end the text are not, other than tags, which stand in the text even where the
        tokenizer prints nothing for them.
        """
        decoder, tag = self.decoder, self._splitter.tag(token)
        ends = token in self.request.stop_ids and not tag
        text = decoder.push(token) if decoder and not ends else ""
        if tag and decoder and not text.endswith(tag):
            text += decoder.flush() + tag
        if not ends:
            self._splitter.push(token, text, counted=not forced or bool(tag))
        if decoder and not tag and (ends or token in decoder.tokenizer.special_ids):
            return decoder.tokenizer.token_bytes(token).decode(errors="replace"), False
        return text, True

    def _keep(self, pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
        for channel, piece in pieces:
            self.texts[channel] += piece
        return pieces

    def _watch(self, token: int) -> None:
        """Look for a loop, and do about it what the request says."""
        found = self._detector.push(token)
        if found is None:
            return
        self._found = found
        wanted = self.request.sampling.values["on_repetition"]
        if wanted == "close_thought" and self.channel == THINKING and self.request.tags and self.request.tags.ids:
            self.close_thought, self._detector = True, self._new_detector()
        elif wanted != "ignore":
            self.finish_reason = "repetition"

    def _new_detector(self) -> RepetitionDetector:
        values = self.request.sampling.values
        return RepetitionDetector(values["min_repeat_count"], values["min_repeat_span"])
