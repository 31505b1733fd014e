"""From what a caller gives (text, messages, ids) to requests that are ready to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from ringkv.engine.config import RingConfig, SamplingParams
from ringkv.engine.idle import fixed_seeds, idle_options
from ringkv.engine.request import Past, Request
from ringkv.engine.sampling.steering import QUEUE
from ringkv.engine.sampling.values import Sampling, suppressed
from ringkv.engine.seeds import effective_seed
from ringkv.engine.snapshot import Snapshot
from ringkv.engine.text.encoding import Conversation, IncrementalDecoder
from ringkv.engine.text.endings import ending_tokens
from ringkv.engine.text.templates import ChatTemplate
from ringkv.engine.text.thoughts import THINKING, ThoughtSplitter, ThoughtTags, strip_thought
from ringkv.errors import RingkvError
from ringkv.models.config import ModelConfig
from ringkv.models.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int] | Snapshot


class Prompts:
    """Encodes and checks prompts for one engine.

    Args:
        config: the model's.
        tokenizer: None: token ids only.
        generation_config: the checkpoint's sampling defaults and ending tokens.
        ring: the ring's options; its pin and budget bear on what is accepted.
        engine_seed: see ``effective_seed``.

    Attributes:
        endings: the ids that end a text, each with its token's text (see ``ending_tokens``).
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        ring: RingConfig,
        engine_seed: int | None,
    ) -> None:
        self.config, self.tokenizer, self.ring, self.engine_seed = config, tokenizer, ring, engine_seed
        self.generation_config = generation_config
        self.template = None
        if tokenizer is not None and tokenizer.chat_template is not None:
            self.template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self.tags = None
        if tokenizer is not None:
            self.tags = ThoughtTags.detect(tokenizer.chat_template, tokenizer.control_tokens)
        self.endings = ending_tokens(config.eos_ids, generation_config, tokenizer, self.template)
        self.eos_ids = frozenset(self.endings)
        # Ids that may be drawn; the rest of a padded vocabulary never is, nor what no token has.
        self.vocabulary = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.size)
        self.holes = frozenset() if tokenizer is None else tokenizer.holes
        self.suppressed = frozenset(suppressed(generation_config, "suppress_tokens"))
        self.not_first = frozenset(suppressed(generation_config, "begin_suppress_tokens"))

    @staticmethod
    def is_batch(prompts: object) -> TypeGuard[Sequence[Any]]:
        """Whether this is a list of prompts and not one prompt."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            return False
        one = all(isinstance(each, int) for each in prompts) or all(isinstance(each, Mapping) for each in prompts)
        return not one or not prompts

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        index: int,
        raw: bool,
        begun: Sequence[int] = (),
        reads: bool = False,
    ) -> list[Request]:
        """The requests of one prompt, one a sample.

        Args:
            begun: see ``Engine.stream``.
            reads: the prompt shall be read and no more. What others said last is then not followed by an answer.

        Raises:
            RingkvError: an empty prompt, one that cannot fit, ids the model does not know.
        """
        conversation, tail = None, "answer"
        messages: list[Message] | None = None
        if isinstance(prompt, str):
            if raw:
                ids = self.encode_raw(prompt)
            elif not prompt.strip():
                raise RingkvError.bad("prompt", prompt, "a text with words")
            else:
                messages = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            messages = list(prompt)
        else:
            ids = prompt
        if messages is not None:
            if raw:
                raise RingkvError("raw: messages need the chat template, which raw mode leaves out; give a text or ids")
            conversation = self.conversation(messages, params.thinking)
            ids = conversation.ids
            role = messages[-1].get("role")
            if reads and role not in ("user", "tool"):
                ids, tail = conversation.ids_without_prompt(), str(role)
        ids = self.check_ids(ids)
        pin, idle_pin = self._pin(ids, conversation)
        inside = self._begins_inside(ids, conversation, params.thinking is True, begun)
        ids += self.check_ids(begun) if begun else []
        sampling = Sampling.resolve(params, self.generation_config)
        seed = effective_seed(params.seed, self.engine_seed, index, sampling.greedy)
        request = self._request(ids, params, sampling, conversation, inside)
        request.warnings += idle_pin
        return [
            dataclasses.replace(request, index=index, seed=seed, sample=sample, pin=pin, tail=tail, reads=reads)
            for sample in range(params.n)
        ]

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        sampling: Sampling,
        conversation: Conversation | None,
        inside: bool,
    ) -> Request:
        """A request for an answer to these ids, but for its index and its noise."""
        stop_ids = self._stop_ids(params, sampling)
        thought, warnings = self._thought(params, sampling)
        idle = idle_options(params, sampling, self.tags, conversation, inside, stop_ids)
        return Request(
            index=0,
            ids=ids,
            params=params,
            sampling=self._fit(len(ids), sampling),
            seed=0,
            stop_ids=stop_ids,
            position_limit=self.config.max_position_embeddings,
            inside_thought=inside,
            warnings=[*warnings, *idle, *fixed_seeds(params.seed, self.engine_seed)],
            **thought,
        )

    def resumed(
        self, snapshot: Snapshot, given: SamplingParams | None, index: int, reads: bool = False
    ) -> list[Request]:
        """The requests that go on from a snapshot: one, or as many samples as ``given`` asks for.

        Args:
            given: None are the snapshot's own params.

        Raises:
            RingkvError: params under which the answer would be over, or what cannot be put in.
        """
        params = given or snapshot.params
        sampling = Sampling.resolve(params, self.generation_config)
        same, tokens = params == snapshot.params and snapshot.more is None, snapshot.tokens
        ids, inside, conversation = self.check_ids(snapshot.prompt), snapshot.inside, None
        past = Past(snapshot, (), not same, tokens, snapshot.forced, snapshot.passed, snapshot.logprobs)
        if snapshot.more is not None:
            if _are_messages(snapshot.more):
                conversation, turn = self._turn(snapshot, params)
                turn = turn[tokens[-1:] == turn[:1] :]  # the answer may have ended its turn itself
                ids, inside = [*ids, *tokens, *turn], conversation.begins_inside()
                past = Past(snapshot, [*snapshot.unread, *turn], changed=True)
            else:
                past = self._put_in(past, self._stop_ids(snapshot.params, sampling), params.logprobs is not None)
        elif snapshot.tail != "answer":
            raise RingkvError(f"append: it ends with the {snapshot.tail} message; accepted are messages to go on with")
        request = self._request(ids, params, sampling, conversation, inside)
        self._check_past(past, request)
        if same:
            request.warnings = list(snapshot.warnings)
        going_on = params.seed is None and tokens
        seed = effective_seed(params.seed, self.engine_seed, index, sampling.greedy)
        request = dataclasses.replace(
            request,
            index=index,
            seed=snapshot.seed if going_on else seed,
            pin=snapshot.pin,
            past=past,
            reads=reads,
        )
        samples = 1 if given is None else params.n
        return [dataclasses.replace(request, sample=snapshot.sample + k) for k in range(samples)]

    def _turn(self, snapshot: Snapshot, params: SamplingParams) -> tuple[Conversation, list[int]]:
        """The ids of further messages, with what ends the turn before them."""
        head: list[Message] = [{"role": snapshot.tail, "content": "x"}]
        if snapshot.tail in ("answer", "assistant"):
            head = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        assert not isinstance(snapshot.more, str | None)
        conversation = self.conversation([*head, *snapshot.more], params.thinking)
        return conversation, conversation.ids_after(len(head), inside=snapshot.tail == "answer")

    def _put_in(self, past: Past, stop_ids: frozenset[int], logprobs: bool) -> Past:
        """An answer with a text or ids put in behind it.

        Args:
            logprobs: whether they are wanted: what is put in has an entry too, so that each is at its token's place.
        """
        snapshot = past.snapshot
        if snapshot.tail != "answer":
            raise RingkvError(f"append: it ends with the {snapshot.tail} message; accepted are messages to go on with")
        more: Any = snapshot.more
        if not isinstance(more, Sequence) or isinstance(more, (bytes, bytearray, memoryview)):
            raise RingkvError.bad("append", more, "a text, token ids or messages")
        ids = self._need_tokenizer().encode(more, control=False) if isinstance(more, str) else list(more)
        tokens, passed, ids = list(past.tokens), list(past.passed), self.check_ids(ids) if ids else []
        if ids and snapshot.ended == "stop" and snapshot.unread and tokens[-1] in stop_ids:
            del tokens[-1]  # what ended the answer gives way
            feed = ids
        else:
            feed = [*snapshot.unread, *ids]
            passed += [len(tokens) - 1] if snapshot.ended and tokens else []
        if not feed:
            raise RingkvError.bad("append", more, "a text, token ids or messages, not empty")
        at = len(tokens)
        forced = [place for place in past.forced if place < at]
        return dataclasses.replace(
            past,
            feed=feed,
            tokens=[*tokens, *ids],
            forced=[*forced, *range(at, at + len(ids))],
            passed=passed,
            logprobs=[*past.logprobs[:at], *({"id": id, "logprob": None, "top": []} for id in ids if logprobs)],
        )

    def _check_past(self, past: Past, request: Request) -> None:
        """Refuse params that the answer so far does not allow; what its text alone shows is found when it is read."""
        limit, count = request.sampling.values["max_tokens"], len(past.tokens)
        if past.tokens:
            self.check_ids(past.tokens)
        if count > limit or (count == limit and past.feed and not request.reads):
            raise RingkvError.bad("max_tokens", limit, f"more than the {count} tokens that the answer has already")
        passed = {*past.passed}
        ends = (token for at, token in enumerate(past.tokens[:-1]) if token in request.stop_ids and at not in passed)
        if (ending := next(ends, None)) is not None:
            raise RingkvError(f"stop_token_ids: the answer has token {ending} already, which ends it with these params")
        if past.snapshot.tokens and request.params.logprobs is not None and past.snapshot.params.logprobs is None:
            raise RingkvError.bad("logprobs", request.params.logprobs, "None, as the snapshot was drawn with")

    def encode(self, messages: Sequence[Message], thinking: bool | str = "auto") -> list[int]:
        """Token ids of a conversation; see ``conversation``."""
        return self.conversation(messages, thinking).ids

    def conversation(self, messages: Sequence[Message], thinking: bool | str = "auto") -> Conversation:
        """A conversation with the generation prompt. Thoughts of earlier turns are left out.

        Args:
            thinking: True or False goes to the template as ``enable_thinking``.
        """
        if self.tags is not None:
            messages = [_without_thought(message, self.tags) for message in messages]
        wanted = thinking if isinstance(thinking, bool) else None
        return Conversation(self._need_tokenizer(), self.template, messages, thinking=wanted, tags=self.tags)

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of a text as it stands."""
        return self._need_tokenizer().encode(text, bos=True)

    def decoder(self) -> IncrementalDecoder | None:
        """A fresh decoder of output tokens; None without a tokenizer."""
        return IncrementalDecoder(self.tokenizer) if self.tokenizer is not None else None

    def texts(self, ids: Sequence[int]) -> tuple[list[str], dict[str, str]]:
        """The text that each id completes, and the names of the special ids among them, whose text is ""."""
        if self.tokenizer is None:
            return [f"[{id}]" for id in ids], {}
        decoder, special = IncrementalDecoder(self.tokenizer), self.tokenizer.special_ids.intersection(ids)
        texts = [decoder.push(id) for id in ids]
        texts[-1] += decoder.flush()
        return texts, {str(id): name for name, id in self.tokenizer.control_tokens.items() if id in special}

    def check_ids(self, ids: Any) -> list[int]:
        """Token ids as a list, each one known to the model, at least one."""
        known = isinstance(ids, Sequence) and not isinstance(ids, (bytes, bytearray, memoryview))
        if not known or not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
            raise RingkvError.bad("prompt", ids, "a text, a list of messages, or a list of token ids")
        if not ids:
            raise RingkvError("prompt: it is empty; at least one token is needed")
        for id in ids:
            if not 0 <= id < self.config.vocab_size:
                raise RingkvError.bad("prompt: token id", id, f"0 to {self.config.vocab_size - 1}")
        return list(ids)

    def _begins_inside(
        self, ids: list[int], conversation: Conversation | None, claimed: bool, begun: Sequence[int]
    ) -> bool:
        """Whether what follows a prompt, and the tokens of an answer that has begun, is a thought.

        In a chat the generation prompt decides (see ``Conversation.begins_inside``), otherwise the end of the prompt
        or, with ``thinking=True``, its last tag (see ``ThoughtTags.begins_inside``). The answer's own tags come after.
        """
        if self.tags is None or self.tokenizer is None:
            return False
        if conversation is not None:
            inside = conversation.begins_inside()
        else:
            inside = self.tags.begins_inside(ids, self._written, claimed)
        splitter, decoder = ThoughtSplitter(self.tags, inside), IncrementalDecoder(self.tokenizer)
        for token in begun:
            splitter.push(token, decoder.push(token))
        return splitter.channel == THINKING

    def _written(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included."""
        tokenizer = self._need_tokenizer()
        return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")

    def _thought(self, params: SamplingParams, sampling: Sampling) -> tuple[dict[str, Any], list[str]]:
        """What a request must know of the thought that it may hold, and what its result must say of it."""
        tags = self.tags
        if params.max_thinking_tokens is not None and (tags is None or tags.ids is None):
            why = "the model has no thoughts" if tags is None else f"{tags.open} and {tags.close} are not single tokens"
            raise RingkvError(f"max_thinking_tokens = {params.max_thinking_tokens}: {why}; accepted is None")
        if tags is None or self.tokenizer is None:
            return {}, []
        message = self.tokenizer.encode(params.thinking_message, control=False)
        if len(message) >= QUEUE:
            raise RingkvError(f"thinking_message: {len(message)} tokens; accepted are up to {QUEUE - 1}")
        loops = ["temperature 0: a model that thinks falls into loops more easily"] if sampling.greedy else []
        return {"tags": tags, "closing_message": message}, loops

    def _stop_ids(self, params: SamplingParams, sampling: Sampling) -> frozenset[int]:
        """The ids that end the text: those that are asked for, as ids or as stop strings, and the model's own."""
        if sampling.values["stop"] and self.tokenizer is None:
            source = "" if params.stop else " (stop_strings of generation_config)"
            raise RingkvError(f"stop{source}: this engine has no tokenizer, so no text to look in; use stop_token_ids")
        if params.logprobs is not None and params.logprobs > self.vocabulary:
            raise RingkvError.bad("logprobs", params.logprobs, f"0 to {self.vocabulary}")
        for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for id in ids:
                if id >= self.vocabulary:
                    raise RingkvError.bad(f"{field}: token id", id, f"0 to {self.vocabulary - 1}")
                if id in self.holes:
                    raise RingkvError.bad(f"{field}: token id", id, "the id of a token; none has this one")
                if id in self.suppressed:
                    raise RingkvError.bad(f"{field}: token id", id, "an id that generation_config does not suppress")
        whole = map(self._control_token, sampling.values["stop"])
        own = frozenset() if params.ignore_eos else self.eos_ids
        return own.union(params.stop_token_ids, (id for id in whole if id is not None))

    def _control_token(self, text: str) -> int | None:
        """The control token that a text is as a whole, blanks that it takes with it included."""
        tokenizer = self._need_tokenizer()
        id = tokenizer.control_tokens.get(text.strip())
        return id if id is not None and id < self.vocabulary and tokenizer.encode(text) == [id] else None

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RingkvError(
                "prompt: the model came without a tokenizer (in a folder: tokenizer.json); give token ids"
            )
        return self.tokenizer

    def _fit(self, n: int, sampling: Sampling) -> Sampling:
        """Under ``full`` a request that could outgrow the ring is refused now; its default limit is what fits."""
        if self.ring.policy.evicts:
            return sampling
        room, wanted = self.ring.capacity - n, sampling.values["max_tokens"]
        if sampling.sources["max_tokens"] != "user" and 1 <= room < wanted:
            return sampling.limited(room)
        if wanted > room:
            raise RingkvError(
                f"max_tokens = {wanted}: with a prompt of {n} tokens that is {n + wanted}, and policy full holds "
                f"{self.ring.capacity} (budget {self.ring.budget} + window {self.ring.window})"
            )
        return sampling

    def _pin(self, ids: list[int], conversation: Conversation | None) -> tuple[int, list[str]]:
        """The end of the pinned span, refused where it leaves nothing to evict, and why a pin does nothing."""
        pin = len(ids) if self.ring.pin == "prompt" else 0
        idle = []
        if self.ring.pin == "system":
            found = None if conversation is None else conversation.system_ids()
            pin = found or 0
            why = "the prompt has no system message" if found is None else "the chat template does not write it whole"
            idle = [] if pin else [f"pin = 'system' does nothing: {why}"]
        if pin > self.ring.sinks and self.ring.policy.evicts:
            self.ring.check_protected(pin, f"pin = {self.ring.pin!r}: pinned tokens")
        return pin, idle


def _are_messages(more: object) -> bool:
    return isinstance(more, Sequence) and bool(more) and isinstance(more[0], Mapping)


def _without_thought(message: Message, tags: ThoughtTags) -> Message:
    """An earlier answer without its thought; any other message as it is."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    content = message.get("content")
    return {**message, "content": strip_thought(content, tags)} if isinstance(content, str) else message
