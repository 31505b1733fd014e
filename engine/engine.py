"""The engine object: a decoder, a ring of some lanes, and the loop that serves requests with them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from functools import cached_property, partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ringkv import __version__
from ringkv.engine.accept import about_ring as snapshot_ring
from ringkv.engine.calibration import check_calibration
from ringkv.engine.call import NO_SNAPSHOTS, Call, Keep
from ringkv.engine.completion import Completion, StreamEvent
from ringkv.engine.config import LANE_LIMIT, RingConfig, SamplingParams
from ringkv.engine.graph import make_runner
from ringkv.engine.host_memory import free_memory
from ringkv.engine.intake import Intake, Params, one_sample
from ringkv.engine.loading import load
from ringkv.engine.loop import Loop
from ringkv.engine.memory import Planner
from ringkv.engine.prompts import Prompt, Prompts
from ringkv.engine.record import Recorder
from ringkv.engine.report import about_ring, completion, failure
from ringkv.engine.request import Generation, Request
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Progress, Runner
from ringkv.engine.score import token_scores
from ringkv.engine.serving import Serving
from ringkv.engine.snapshot import More, Snapshot
from ringkv.errors import MOST, RingkvError, check_count, check_int, size
from ringkv.kernels.backend import check, use
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.tokenizer import Tokenizer
from ringkv.models.weights import load_weights

ROUGHLY = 128  # bytes for each number in the rows of a token: far more than reading it takes, so nothing is planned


class Engine:
    """A decoder with a KV ring, ready to generate.

    Args:
        model: a ``Decoder`` with its weights set; a state dict under Hugging Face names together with ``config``; or
            what opens a checkpoint, which is called once the options are accepted, and brings its own tokenizer,
            ``generation_config`` and ``name`` (see ``from_pretrained``).
        tokenizer: needed for text; without one, prompts are token ids and results hold ids only.
        config: for a state dict: a ``ModelConfig`` or the keys of config.json.
        ring: size and policy of the ring.
        lanes: sequences that run at once; "auto": as many as fit the memory, up to 16 (see ``memory.settle``).
        device: "auto" is the GPU if there is one.
        dtype: "auto" is the checkpoint's own on a GPU; on a CPU "float16", which keeps the weights in half precision
            and computes in float32 where the processor has such a product, else "float32".
        backend: "torch"; "triton" (kernels and a captured step, on a GPU); "native" (on a CPU in float32, with a C
            compiler); or "auto": triton or native where it runs.
        seed: from it and the request's index a seed is drawn for requests without one.
        threads: CPU threads while this engine computes; restored after each step.
        generation_config: sampling defaults and ending tokens of the checkpoint.
        name: what results call the model.

    Raises:
        RingkvError: an option, config or weight that is not accepted, by name.

    >>> with Engine.from_pretrained("smollm2", ring=RingConfig(budget=48, window=16), dtype="float32") as engine:
    ...     done = engine.generate("Name a colour.", SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    >>> done.completion_tokens, done.finish_reason, done.ring["capacity"]
    (90, 'length', 64)
    >>> done.ring["evictions"] > 0, done.ring["kept"] <= 64
    (True, True)
    """

    def __init__(
        self,
        model: Decoder | Mapping[str, Tensor] | Callable[[], Checkpoint],
        tokenizer: Tokenizer | None = None,
        *,
        config: ModelConfig | Mapping[str, Any] | None = None,
        ring: RingConfig | None = None,
        lanes: int | Literal["auto"] = 1,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        seed: int | None = None,
        threads: int | None = None,
        generation_config: Mapping[str, Any] | None = None,
        name: str = "in-memory",
    ) -> None:
        _check_options(ring, lanes, backend, seed, threads)
        source: Decoder | Checkpoint
        if isinstance(model, Decoder):
            source = model
        elif callable(model):
            source = model()
            tokenizer, generation_config, name = source.tokenizer(), source.generation_config, source.name
        elif config is None:
            raise RingkvError("config: a state dict needs its config, a ModelConfig or the keys of config.json")
        else:
            source = StateDictCheckpoint(model, config)
        options = {"device": device, "dtype": dtype, "backend": backend}
        model, self.backend, ring, lanes = load(source, ring or RingConfig(), lanes, **options)
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.lanes, self.seed, self.threads = lanes, seed, threads
        self.generation_config = dict(generation_config or {})
        self.ring = Ring(model.config, ring, lanes, model.device, model.dtype)
        check_calibration(ring.policy, model)
        self.prompts = Prompts(model.config, tokenizer, self.generation_config, ring, seed)
        tags = None if self.prompts.tags is None else self.prompts.tags.ids
        with use(self.backend):
            self._runner = make_runner(model, self.ring, self.prompts.vocabulary, tags)
            self._runner.sampler.forbid(self.prompts.holes | self.prompts.suppressed, self.prompts.not_first)
        kinds = {"weights": model.weight_dtype, "compute": model.dtype, "ring": self.ring.k.dtype}
        dtypes = {kind: str(value).removeprefix("torch.") for kind, value in kinds.items()}
        self._kind: dict[str, Any] = {"dtype": dtypes, "backend": self.backend}
        self._ring_about = about_ring(self.ring)
        self._intake = Intake(self.prompts, lambda: self._runner, self._about_snapshots, self._refused)
        loop = Loop(self._runner, self._start, self._report, self._snapshot, self._check_room)
        self._serving = Serving(loop, self._limited)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "smollm2",
        *,
        ring: RingConfig | None = None,
        lanes: int | Literal["auto"] = 1,
        device: str = "auto",
        dtype: str = "auto",
        backend: str = "auto",
        revision: str | None = None,
        seed: int | None = None,
        threads: int | None = None,
    ) -> Engine:
        """Load a checkpoint: a folder of safetensors, a .gguf file, a hub id, or the alias "smollm2".

        Raises:
            RingkvError: what is not found, not understood or not accepted, by name.
        """
        return cls(
            partial(open_checkpoint, model, revision=revision),
            ring=ring,
            lanes=lanes,
            device=device,
            dtype=dtype,
            backend=backend,
            seed=seed,
            threads=threads,
        )

    # A text is a sequence of texts too, and an empty list fits any form: the first one that fits is the one meant.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: None = None, *, raw: bool = False, trace: bool = False, keep: bool = False
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams, *, raw: bool = False, trace: bool = False, keep: bool = False
    ) -> Completion | list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        raw: bool = False,
        trace: bool = False,
        keep: bool = False,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        raw: bool = False,
        trace: bool = False,
        keep: bool = False,
    ) -> Completion | list[Completion]:
        """Generate to the end.

        Args:
            prompts: a text (one user message), a list of messages, a list of token ids, a ``Snapshot``, or a list of
                any of these.
            params: for all, or one for each prompt. For a snapshot, None are its own, and ``n`` samples fork it.
            raw: take texts as they are, without the chat template.
            trace: record where every token goes; each completion then has a ``trace``.
            keep: each completion has a ``snapshot``, from which it can be gone on with.

        Returns:
            A ``Completion`` for one prompt, or with n > 1 the list of its samples; for a list of prompts always a list,
            in their order, samples adjacent.

        Raises:
            RingkvError: a lone prompt that is refused. In a list its completion carries ``error``.
        """
        if self.prompts.is_batch(prompts):
            return _in_order(self._completions(self._call_all(prompts, params, raw, trace, Keep(keep))))
        requests = self._requests(prompts, params, 0, raw, trace)
        samples = _in_order(self._completions(self._call(requests, trace=trace, keep=Keep(keep))))
        return samples if len(samples) > 1 else samples[0]

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        raw: bool = False,
        trace: bool = False,
        keep: bool = False,
    ) -> Completion | list[Completion]:
        """``generate`` for a task of an event loop. Requests of all tasks and threads share the lanes.

        Cancelling the task ends its requests. See ``astream`` for what happens where there are many.
        """
        async with self._serving.place(self.lanes):
            if batch := self.prompts.is_batch(prompts):
                call = self._call_all(prompts, params, raw, trace, Keep(keep))
            else:
                requests = await asyncio.to_thread(self._requests, prompts, params, 0, raw, trace)
                call = self._call(requests, trace=trace, keep=Keep(keep))
            async with aclosing(self._serving.aevents(call)) as events:
                done = [(index, event.completion) async for index, event in events if event.completion is not None]
        samples = _in_order(done)
        return samples if batch or len(samples) > 1 else samples[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_prefill: Progress | None = None,
        begun: Sequence[int] = (),
        trace: bool = False,
        keep: bool = False,
        every: int = 0,
    ) -> Generator[StreamEvent, None, None]:
        """Generate from one prompt, event by event; the last one carries the completion. Closing it cancels.

        Args:
            on_prefill: called with (layers done, layers in all) while the prompt is read.
            begun: tokens of an answer to go on with; they are read with the prompt, and a pin ends before them.
            trace, keep: as of ``generate``.
            every: after so many tokens, and each multiple, an event has a ``snapshot``; 1 is every token.
        """
        if self.prompts.is_batch(prompt):
            raise RingkvError("stream: one prompt at a time; use iterate or generate for a list")
        check_int("every", every, 0)
        requests = self._requests(prompt, one_sample(params), 0, raw, trace, begun)
        return self._events(self._call(requests, on_prefill, trace, Keep(keep, every)))

    def resume(
        self,
        snapshot: Snapshot | str | os.PathLike[str],
        params: SamplingParams | None = None,
        append: More | None = None,
        *,
        on_prefill: Progress | None = None,
        keep: bool = False,
        every: int = 0,
    ) -> Generator[StreamEvent, None, None]:
        """Go on from a snapshot, or from its file, as ``stream`` does; what comes is what would have come.

        Args:
            params: None are the snapshot's. ``max_tokens`` counts the answer from its beginning.
            append: what is read first; see ``Snapshot.then``.
            on_prefill, keep, every: as of ``stream``.

        Raises:
            RingkvError: a file that holds no snapshot, one of another model or ring, or params that it does not allow.
        """
        if not isinstance(snapshot, Snapshot):
            snapshot = self.load(snapshot)
        if append is not None:
            snapshot = snapshot.then(append)
        return self.stream(snapshot, params, on_prefill=on_prefill, keep=keep, every=every)

    def load(self, path: str | os.PathLike[str]) -> Snapshot:
        """Read the file of a snapshot that this engine can go on from; its sizes are compared before it is read.

        Raises:
            RingkvError: it is none, or one of another model or ring; it names the file and what differs.
        """
        self._serving.check_open()
        return self._intake.load(path)

    def read(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_prefill: Progress | None = None,
    ) -> Snapshot:
        """Read a prompt once, for any number of answers to it: the snapshot before the first token.

        Messages that end with the user's (or a tool's) wait for an answer. Others are a head, which messages must
        follow (see ``Snapshot.then``): a system message, or examples.

        Args:
            params: their seed is that of the noise by which a prompt longer than the ring is ranked.
        """
        requests = self._requests(prompt, one_sample(params), 0, raw, trace=False, reads=True)
        ((_, done),) = self._completions(self._call(requests, on_prefill, keep=Keep(last=True)))
        if done.snapshot is None:
            raise RingkvError(f"read: {done.error['message'] if done.error is not None else 'it was cancelled'}")
        return done.snapshot

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        begun: Sequence[int] = (),
        trace: bool = False,
        keep: bool = False,
        every: int = 0,
    ) -> AsyncGenerator[StreamEvent, None]:
        """``stream`` for a task of an event loop. Closing it, or cancelling the task, ends the request.

        Requests of all tasks and threads share the lanes and are read in turn. Up to ``lanes + serving.ASYNC_QUEUE``
        calls of an event loop are served or wait in the engine; a task beyond these waits before its prompt is read.
        What a task has not taken yet is kept for it, at most its ``max_tokens``, and holds up nobody.
        """
        if self.prompts.is_batch(prompt):
            raise RingkvError("astream: one prompt at a time; use agenerate for a list")
        check_int("every", every, 0)
        async with self._serving.place(self.lanes):
            arguments = prompt, one_sample(params), 0, raw, trace, begun
            requests = await asyncio.to_thread(self._requests, *arguments)
            call = self._call(requests, trace=trace, keep=Keep(keep, every))
            async with aclosing(self._serving.aevents(call)) as events:
                async for _, event in events:
                    yield event

    def iterate(
        self,
        prompts: Iterable[Prompt],
        params: Params | Iterator[SamplingParams] = None,
        *,
        raw: bool = False,
        keep: bool = False,
        every: int = 0,
        on_snapshot: Callable[[int, Snapshot], object] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """(index, completion) of each prompt as it finishes. Closing it cancels what still runs.

        Args:
            prompts: a list, or an iterator of any length: a prompt is taken from it when a lane is free.
            params: for all, or one for each prompt.
            keep: as of ``generate``.
            every: as of ``stream``; ``on_snapshot`` is called with the index and the snapshot.
        """
        check_int("every", every, 0)
        return self._completions(self._call_all(prompts, params, raw, keep=Keep(keep, every)), on_snapshot)

    def cancel(self, index: int) -> bool:
        """End the request with this index, of every call that is open; its completion says "cancelled".

        Returns:
            Whether a call is open.
        """
        return self._serving.cancel(index)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, as raw mode reads it: control tokens parsed, BOS once where the model has it."""
        return self.prompts.encode_raw(text)

    def score(self, ids: Sequence[int], seeds: Sequence[int] | None = None) -> Tensor:
        """Log-probability of each token after the first, under the ring: fed singly, evicting as decode does.

        Args:
            ids: n >= 2 token ids; ids[0] is prefilled.
            seeds: one run a seed, as many at once as there are lanes.

        Returns:
            float32 [n - 1], or [len(seeds), n - 1].
        """
        if isinstance(ids, str):
            raise RingkvError.bad("ids", ids, "a list of token ids (see encode)")
        ids = self.prompts.check_ids(ids)
        if seeds is not None:
            if not seeds:
                raise RingkvError.bad("seeds", seeds, "one seed or more, or None")
            for seed in seeds:
                SamplingParams(seed=seed)
        if len(ids) < 2:
            raise RingkvError.bad("ids", ids, "two tokens or more")
        with self.alone() as runner:
            if not self.ring.policy.evicts and len(ids) - 1 > self.ring.config.capacity:
                capacity = self.ring.config.capacity
                raise RingkvError(f"ids: {len(ids) - 1} tokens to read, and policy full holds {capacity}")
            scores = token_scores(runner, ids, seeds if seeds is not None else [self.seed or 0]).cpu()
        return scores if seeds is not None else scores[0]

    @contextmanager
    def alone(self) -> Iterator[Runner]:
        """The runner, for code that steps it itself: no other call runs meanwhile, and no lane afterwards.

        Requests that run are served to their end first; those that wait go on waiting.
        """
        with self._serving.alone(), self._limits():
            self._check_weights()
            try:
                yield self._runner
            finally:
                self.ring.stop_all()

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace every weight in place, for training loops; names as in the checkpoint.

        An update that an exception interrupts, such as Ctrl-C, leaves weights of two models. Nothing is computed with
        them: until another update has succeeded, every use raises RingkvError.

        Raises:
            RingkvError: names or shapes that do not fit; nothing is written then.
        """
        with self._serving.alone():
            load_weights(self.model, StateDictCheckpoint(state_dict, self.model.config))

    def about(self) -> dict[str, Any]:
        """What runs, as results name it: model, dtype {weights, compute, ring}, backend."""
        return {"model": self.name, **self._kind}

    def plan(self) -> dict[str, int]:
        """Bytes that this engine holds: weights, ring and scratch."""
        return {
            "weights_bytes": self.model.nbytes,
            "ring_bytes": self.ring.nbytes,
            "scratch_bytes": self.ring.scratch.nbytes,
        }

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that can be read in the memory that is free now; 0 where not one can."""
        free = free_memory(self.model.device)
        return self._planner.longest_prompt(self.ring.config, MOST if free is None else free)

    def close(self) -> None:
        """Cancel what runs and free everything. The engine cannot be used afterwards; a second close does nothing."""
        self._serving.close()
        for part in ("model", "ring", "_runner"):
            vars(self).pop(part, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _about_snapshots(self) -> dict[str, Any]:
        """What snapshots say of this engine."""
        ring, dtypes = snapshot_ring(self.ring), self._kind["dtype"]
        machine = {"dtype": [dtypes["weights"], dtypes["compute"]], "backend": self.backend}
        digest = {"ringkv": __version__, "model": self.name, "digest": self.model.digest}
        return {**digest, **ring, **machine, "device": self.model.device.type}

    def _snapshot(self, generation: Generation, held: dict[str, Tensor]) -> Snapshot:
        request = generation.request
        return Snapshot(
            about=self._about_snapshots(),
            params=request.params,
            seed=request.seed,
            sample=request.sample,
            pin=request.pin,
            inside=request.inside_thought,
            tail=request.tail,
            ended="" if request.reads else generation.finish_reason or "",
            warnings=list(request.warnings),
            retained=list(generation.retained),
            passed=list(generation.passed),
            prompt=request.ids,
            tokens=list(generation.tokens),
            forced=list(generation.forced),
            logprobs=list(generation.logprobs),
            lane=held,
        )

    def _requests(self, *given: Any, **options: Any) -> list[Request]:
        self._serving.check_open()
        return self._intake.requests(*given, **options)

    def _call(
        self,
        requests: list[Request],
        on_prefill: Progress | None = None,
        trace: bool = False,
        keep: Keep = NO_SNAPSHOTS,
    ) -> Call:
        """A call for the samples of one prompt."""
        return self._serving.register(Call([(0, requests)], on_prefill, Recorder(self.ring) if trace else None, keep))

    def _call_all(
        self,
        prompts: Iterable[Any],
        params: Params | Iterator[SamplingParams],
        raw: bool,
        trace: bool = False,
        keep: Keep = NO_SNAPSHOTS,
    ) -> Call:
        """A call for many prompts; each is prepared when a lane is free for it."""
        waves = self._intake.waves(prompts, params, raw, trace)
        return self._serving.register(Call(waves, recorder=Recorder(self.ring) if trace else None, keep=keep))

    def _refused(self, error: Exception) -> Completion:
        return failure(self.about(), self._ring_about, error)

    def _completions(
        self, call: Call, on_snapshot: Callable[[int, Snapshot], object] | None = None
    ) -> Generator[tuple[int, Completion], None, None]:
        with closing(self._serving.events(call)) as events:
            for index, event in events:
                if event.snapshot is not None and on_snapshot is not None and event.completion is None:
                    on_snapshot(index, event.snapshot)
                if event.completion is not None:
                    yield index, event.completion

    def _events(self, call: Call) -> Generator[StreamEvent, None, None]:
        with closing(self._serving.events(call)) as events:
            for _, event in events:
                yield event

    def _report(self, generation: Generation, recorder: Recorder | None, snapshot: Snapshot | None) -> Completion:
        record = None
        if recorder is not None and generation.retained:  # its prompt was read
            request = generation.request
            record = recorder.record(generation.lane, request.ids, generation.tokens, request.pin)
        return completion(self.about(), self._ring_about, generation, record, snapshot)

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.model.config, self.model.dtype)

    def _check_room(self, tokens: int) -> None:
        """Refuse a prompt that would be read into memory that is not there; a system that lends it ends the process.

        Raises:
            MemoryError: with the arithmetic. A GPU refuses what it has not, and is not asked.
        """
        self._check_weights()
        config = self.model.config
        width = config.hidden_size + config.intermediate_size + (config.heads + 2 * config.kv_heads) * config.head_dim
        free = free_memory(self.model.device) if self.model.device.type == "cpu" else None
        if free is None or tokens * width * ROUGHLY <= free:
            return
        needed = self._planner.prefill_bytes(self.ring.config, tokens)
        if needed > free:
            longest = self._planner.longest_prompt(self.ring.config, free)
            raise MemoryError(
                f"memory: to read a prompt of {tokens} tokens takes {size(needed)}, and {size(free)} are free; "
                f"accepted are up to {longest} tokens"
            )

    def _check_weights(self) -> None:
        if self.model.torn:
            raise RingkvError("weights: an update was interrupted, and only some are new: accepted is another update")

    def _start(self, request: Request, lane: int) -> Generation:
        return Generation(request, lane, self.prompts.decoder())

    def _limited(self, work: Callable[[], None]) -> None:
        with self._limits():
            work()

    @contextmanager
    def _limits(self) -> Iterator[None]:
        """What holds while this engine computes: its backend and its thread count."""
        before = torch.get_num_threads()
        with use(self.backend):
            if self.threads is None or self.threads == before:
                yield
                return
            torch.set_num_threads(self.threads)
            try:
                yield
            finally:
                torch.set_num_threads(before)


def _in_order(results: Iterable[tuple[int, Completion]]) -> list[Completion]:
    """By prompt, then by sample."""
    return [done for _, done in sorted(results, key=lambda pair: (pair[0], pair[1].sample))]


def _check_options(ring: object, lanes: object, backend: object, seed: object, threads: object) -> None:
    if ring is not None and not isinstance(ring, RingConfig):
        raise RingkvError.bad("ring", ring, "a RingConfig")
    check_count("lanes", lanes, LANE_LIMIT)
    if threads is not None:
        check_int("threads", threads, 1, 1024)
    check(backend)
    SamplingParams(seed=seed)  # type: ignore[arg-type]
