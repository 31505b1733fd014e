"""A conversation without a terminal: its history, its options, its answers."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringkv.apps.chat.transcript import PARAMS, Messages, read_transcript, ring_path, write_transcript
from ringkv.engine import (
    ANSWER,
    THINKING,
    UNFINISHED,
    Completion,
    Engine,
    Progress,
    Sampling,
    SamplingParams,
    Snapshot,
    StreamEvent,
)
from ringkv.errors import RingkvError, naming

Events = Generator[StreamEvent, None, None]


@dataclass
class _Answer:
    """An answer as it comes, and the question that it answers.

    Attributes:
        turns: the conversation up to the question.
        prompt: the messages that were rendered, with ``thinking``, for the first token.
        ids: the answer's tokens, the thought's among them.
        seed: what it was drawn with, once known.
        channel: where it stopped.
        unfinished: whether a limit or an interrupt stopped it.
        before: what it was asked on: the ring after the answer before it; None where all was read anew.
        ring: what comes after it goes on from.
    """

    turns: Messages
    prompt: Messages
    thinking: bool | str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    thought: str = ""
    seed: int | None = None
    channel: str = ANSWER
    unfinished: bool = False
    before: Snapshot | None = None
    ring: Snapshot | None = None


class ChatSession:
    """A conversation with an engine.

    The template is rendered anew for every question, with the answers alone: thoughts leave the history. A question
    enters the history with its answer, whole or cut off; one that is refused or fails leaves no trace.

    A conversation that was loaded with its ring goes on from there: only the question is read, and what the ring has
    forgotten stays forgotten, until another system message or ``reset`` begins anew.

    Args:
        engine: answers, one question at a time.
        params: how answers are drawn; ``set`` changes them.
        system: the system message.
        show_thinking: what whoever draws the conversation should do with thoughts.

    Attributes:
        turns: {role, content}, user and assistant in turn, without the system message.
        last: the completion of the last answer.
        on_prefill: called as a prompt is read; see ``Engine.stream``.

    Raises:
        RingkvError: an option that the engine refuses, or a model without a chat template.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams | None = None,
        system: str | None = None,
        *,
        show_thinking: bool = True,
    ) -> None:
        self.engine, self.show_thinking = engine, show_thinking
        self.params = self._checked(params or SamplingParams())
        self.system: str | None = None
        self.set_system(system)
        engine.prompts.encode([{"role": "user", "content": "Hi"}])
        self.turns: Messages = []
        self.last: Completion | None = None
        self.on_prefill: Progress | None = None
        self._answer: _Answer | None = None
        self._on_ring = False  # whether the next question goes on from the ring after the last answer
        self._seed: int | None = None  # params.seed when the last question was asked
        self._totals = Counter(answers=0, tokens=0, evictions=0)

    @property
    def messages(self) -> Messages:
        """The history as the template gets it."""
        return self._with_system(self.turns)

    @property
    def thought(self) -> str:
        """The last answer's thought."""
        return self._answer.thought if self._answer is not None else ""

    @property
    def unfinished(self) -> bool:
        """Whether the last answer was cut off by a limit or an interrupt."""
        return self._answer is not None and self._answer.unfinished

    def send(self, text: str) -> Events:
        """Ask. The history grows when the answer ends; closing the iterator stops it and keeps what came.

        Raises:
            RingkvError: nothing to send, or a conversation that the engine refuses.
        """
        if not isinstance(text, str) or not text.strip():
            raise RingkvError.bad("message", text, "a text that is not empty")
        ring = self._answer.ring if self._answer is not None and self._on_ring else None
        return self._ask([*self.turns, {"role": "user", "content": text}], self.params, ring)

    def retry(self) -> Events:
        """Ask the last question again, with the next seed unless ``set`` gave another; replaces its answer."""
        if not self.turns:
            raise RingkvError("retry: nothing was asked yet")
        params = self.params
        if self._answer is not None and self._answer.seed is not None and params.seed == self._seed:
            params = params.replace(seed=(self._answer.seed + 1) % 2**64)
        return self._ask(self.turns[:-1], params, None if self._answer is None else self._answer.before)

    def resume(self) -> Events:
        """Go on with an answer that was cut off. Its tokens are read again as part of the prompt, thought included.

        Raises:
            RingkvError: there is none, or it cannot be continued from its tokens alone.
        """
        if self._answer is None or not self.unfinished:
            raise RingkvError("continue: no answer was cut off by max_tokens or Ctrl-C")
        tags = self.engine.prompts.tags
        if self._answer.channel == THINKING and tags is not None and tags.ids is None:
            raise RingkvError(f"continue: it stopped inside a thought, and {tags.close} is not a single token")
        if self._on_ring and self._answer.ring is not None:
            ring, most = self._answer.ring, self.params.replace(seed=None)
            if most.max_tokens is not None:
                most = most.replace(max_tokens=len(ring.tokens) + most.max_tokens)
            events = self.engine.resume(ring, most, on_prefill=self.on_prefill, keep=True)
            return self._take(dataclasses.replace(self._answer, ids=list(self._answer.ids)), events, whole=True)
        answer = self._whole(self._answer)
        seed = self.params.seed if answer.seed is None else answer.seed
        params = self.params.replace(seed=seed, thinking=answer.thinking)
        events = self.engine.stream(answer.prompt, params, on_prefill=self.on_prefill, begun=answer.ids, keep=True)
        return self._take(answer, self._spaced(events) if answer.ids else events)

    def _ask(self, turns: Messages, params: SamplingParams, ring: Snapshot | None) -> Events:
        answer = _Answer(turns, self._with_system(turns), params.thinking, before=ring)
        if ring is not None:
            events = self.engine.resume(ring, params, turns[-1:], on_prefill=self.on_prefill, keep=True)
        else:
            events = self.engine.stream(answer.prompt, params, on_prefill=self.on_prefill, keep=True)
        self._seed = self.params.seed
        return self._take(answer, events)

    def _take(self, answer: _Answer, events: Events, whole: bool = False) -> Events:
        """Pass events on, and keep what they say.

        Args:
            whole: their completion tells of the whole answer. What was held back at its cut comes in them once more.
        """
        with closing(events):
            try:
                for event in events:
                    answer.ids += event.token_ids
                    answer.channel = event.channel
                    if event.channel == ANSWER:
                        answer.text += event.text
                    else:
                        answer.thought += event.text
                    if event.completion is not None:
                        if whole:
                            answer.text, answer.thought = event.completion.text, event.completion.thinking or ""
                        self._keep(answer, event.completion)
                    yield event
            except GeneratorExit:
                if event.completion is None:
                    self._keep(answer, None)
                raise

    def _keep(self, answer: _Answer, done: Completion | None) -> None:
        self.last = done
        if done is not None:
            self._totals.update(answers=1, tokens=done.completion_tokens, evictions=done.ring["evictions"])
            if done.error is not None:
                return
            answer.seed = done.ring["seed"]
        answer.ring = None if done is None else done.snapshot
        answer.unfinished = done is None or done.finish_reason in UNFINISHED
        self._answer = answer
        self.turns = [*answer.turns, {"role": "assistant", "content": answer.text}]

    def _whole(self, answer: _Answer) -> _Answer:
        """A copy without the tokens of half a character at its end, which are drawn again."""
        tokenizer, ids, text = self.engine.tokenizer, answer.ids, answer.text
        if tokenizer is not None and tokenizer.decode(ids).endswith("\ufffd"):
            drop = next((n for n in (1, 2, 3) if not tokenizer.decode(ids[:-n]).endswith("\ufffd")), 0)
            ids, text = (ids[:-drop], text.rstrip("\ufffd")) if drop else (ids, text)
        return dataclasses.replace(answer, ids=list(ids), text=text)

    def _spaced(self, events: Events) -> Events:
        """With the space that SentencePiece's first word begins with: this text is not the first."""
        tokenizer = self.engine.tokenizer
        with closing(events):
            first = tokenizer is not None and tokenizer.drops_space
            for event in events:
                if first and event.token_ids and tokenizer is not None:
                    space = " " if tokenizer.token_bytes(event.token_ids[0]).startswith(b" ") else ""
                    event, first = dataclasses.replace(event, text=space + event.text), False
                yield event

    def reset(self) -> None:
        """Forget the conversation; system message and options stay."""
        self.turns = []
        self.last = self._answer = self._seed = None
        self._on_ring = False

    def set_system(self, text: str | None) -> None:
        """Set the system message, or with None take it away; it counts from the next question on."""
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise RingkvError.bad("system", text, "a text that is not empty")
        self.system, self._on_ring = text, False

    def set(self, name: str, value: Any) -> None:
        """Set a field of SamplingParams.

        Raises:
            RingkvError: an unknown field, or a value that it, the model or the ring does not accept.
        """
        if name not in PARAMS:
            close = difflib.get_close_matches(name, PARAMS, 1) or PARAMS
            raise RingkvError(f"set: {name} is not known; accepted is {' or '.join(close)}")
        self.params = self._checked(self.params.replace(**{name: value}))

    def stats(self) -> dict[str, Any]:
        """Figures of the conversation; the sampling values are those of the next answer, the ring's of the last."""
        config, last = self.engine.ring.config, self.last
        ring = {"policy": self.engine.ring.policy.name, "budget": config.budget, "window": config.window}
        ring |= {"capacity": config.capacity, "bytes": self.engine.ring.nbytes}
        return {
            "model": self.engine.name,
            "turns": len(self.turns) // 2,
            **self._totals,
            "sampling": Sampling.resolve(self.params, self.engine.generation_config).report(),
            "seed": self.params.seed,
            "ring": ring | (last.ring if last is not None else {}),
            "last": None if last is None else last.to_dict(),
        }

    def save(self, path: str | Path) -> None:
        """Write messages and options as JSON, and the ring after the last answer beside it."""
        ring = self._answer.ring if self._answer is not None else None
        write_transcript(path, self.engine.name, self.messages, self.params, ring)

    def load(self, path: str | Path) -> str:
        """Go on from a saved conversation, with its options and its ring; nothing changes where it is refused.

        Returns:
            In a few words, whether its ring is there; without it the conversation is read anew.

        Raises:
            RingkvError: a file that cannot be read, that holds no conversation, or none that this model can go on with.
        """
        messages, params, mark = read_transcript(path)
        with naming(f"load: {str(path)!r}"):
            self._checked(params)
            if messages:
                self.engine.prompts.encode(messages)
        ring, why = None, "without a ring"
        if mark is not None:
            try:
                ring, why = self.engine.load(ring_path(path)), "with its ring"
                if ring.about.get("chat") != mark:
                    ring, why = None, "without its ring, which is of another save"
            except RingkvError as error:
                why = f"without its ring ({error})"
        self.reset()
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.turns, self.params = messages, params
        if ring is not None and messages:
            ids, unfinished = list(ring.tokens), ring.ended in UNFINISHED
            answer = _Answer(messages[:-1], [], params.thinking, ids, messages[-1]["content"], seed=ring.seed)
            self._answer = dataclasses.replace(answer, ring=ring, unfinished=unfinished)
            self._on_ring = True
        return why

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """The params, if this model and ring can answer with them."""
        if params.n != 1:
            raise RingkvError.bad("n", params.n, "1 in a chat")
        self.engine.prompts.prepare([0], params, index=0, raw=False)
        return params

    def _with_system(self, turns: Messages) -> Messages:
        return [*([{"role": "system", "content": self.system}] if self.system is not None else []), *turns]
