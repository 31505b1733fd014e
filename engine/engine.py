"""The engine object: a decoder, a ring of some lanes, and the loop that serves requests with them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from ringkv.engine.calibration import check_calibration
from ringkv.engine.completion import Completion, StreamEvent
from ringkv.engine.config import LANE_LIMIT, RingConfig, SamplingParams
from ringkv.engine.graph import make_runner
from ringkv.engine.loading import load
from ringkv.engine.loop import Loop
from ringkv.engine.prompts import Prompt, Prompts
from ringkv.engine.record import Record, Recorder, check_countable
from ringkv.engine.report import completion, failure
from ringkv.engine.request import Generation, Request
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Progress, Runner
from ringkv.engine.score import token_scores
from ringkv.errors import RingkvError, check_count, check_int
from ringkv.kernels.backend import check, use
from ringkv.models.checkpoints.base import Checkpoint
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.tokenizer import Tokenizer
from ringkv.models.weights import load_weights

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


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
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._cancelled: set[int] = set()
        self._closed = False

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
        self, prompts: Prompt, params: None = None, *, raw: bool = False, trace: bool = False
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams, *, raw: bool = False, trace: bool = False
    ) -> Completion | list[Completion]: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, raw: bool = False, trace: bool = False
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, raw: bool = False, trace: bool = False
    ) -> Completion | list[Completion]:
        """Generate to the end.

        Args:
            prompts: a text (one user message), a list of messages, a list of token ids, or a list of any of these.
            params: for all, or one for each prompt.
            raw: take texts as they are, without the chat template.
            trace: record where every token goes; each completion then has a ``trace``.

        Returns:
            A ``Completion`` for one prompt, or with n > 1 the list of its samples; for a list of prompts always a list,
            in their order, samples adjacent.

        Raises:
            RingkvError: a lone prompt that is refused. In a list its completion carries ``error``.
        """
        if not self.prompts.is_batch(prompts):
            requests = self._prepare(prompts, params, 0, raw, trace)
            samples = sorted((done for _, done in self._iterate(requests, trace)), key=lambda done: done.sample)
            return samples if len(samples) > 1 else samples[0]
        results = list(self._iterate(self._prepare_all(prompts, params, raw, trace), trace))
        return [done for _, done in sorted(results, key=lambda pair: (pair[0], pair[1].sample))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        on_prefill: Progress | None = None,
        begun: Sequence[int] = (),
        trace: bool = False,
    ) -> Generator[StreamEvent, None, None]:
        """Generate from one prompt, event by event; the last one carries the completion. Closing it cancels.

        Args:
            on_prefill: called with (layers done, layers in all) while the prompt is read.
            begun: tokens of an answer to go on with; they are read with the prompt, and a pin ends before them.
            trace: as of ``generate``.
        """
        if self.prompts.is_batch(prompt):
            raise RingkvError("stream: one prompt at a time; use iterate or generate for a list")
        params = _one(params)
        if params.n > 1:
            raise RingkvError(f"stream: n = {params.n} samples; accepted is 1 (use generate)")
        return self._events(self._prepare(prompt, params, 0, raw, trace, begun), on_prefill, trace)

    def iterate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        raw: bool = False,
    ) -> Generator[tuple[int, Completion], None, None]:
        """(index, completion) of each prompt as it finishes. Closing it cancels what still runs."""
        return self._iterate(self._prepare_all(prompts, params, raw))

    def cancel(self, index: int) -> None:
        """End the request with this index of the call that runs; its completion says "cancelled"."""
        self._cancelled.add(index)

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
        """The runner, for code that steps it itself: no other call runs meanwhile, and no lane afterwards."""
        with self._exclusive(), self._limits():
            try:
                yield self._runner
            finally:
                self.ring.stop_all()

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace every weight in place, for training loops; names as in the checkpoint.

        Raises:
            RingkvError: names or shapes that do not fit; nothing is written then.
        """
        with self._exclusive():
            load_weights(self.model, StateDictCheckpoint(state_dict, self.model.config))

    def about(self) -> dict[str, Any]:
        """What runs, as results name it: model, dtype {weights, compute, ring}, backend."""
        kinds = {"weights": self.model.weight_dtype, "compute": self.model.dtype, "ring": self.ring.k.dtype}
        dtype = {name: str(kind).removeprefix("torch.") for name, kind in kinds.items()}
        return {"model": self.name, "dtype": dtype, "backend": self.backend}

    def plan(self) -> dict[str, int]:
        """Bytes that this engine holds: weights, ring and scratch."""
        return {
            "weights_bytes": self.model.nbytes,
            "ring_bytes": self.ring.nbytes,
            "scratch_bytes": self.ring.scratch.nbytes,
        }

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards; a second close does nothing."""
        if not self._closed:
            with self._exclusive():
                self._closed = True
                del self.model, self.ring, self._runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self, prompt: object, params: object, index: int, raw: bool, trace: bool, begun: Sequence[int] = ()
    ) -> list[Request]:
        requests = self.prompts.prepare(prompt, _one(params), index=index, raw=raw, begun=begun)
        if trace:
            config, request = self.ring.config, requests[0]
            read = min(len(request.ids), config.capacity) + request.sampling.values["max_tokens"]
            check_countable((read - config.budget_tokens) // config.window if self.ring.policy.evicts else 0)
        return requests

    def _prepare_all(
        self, prompts: Prompt | Sequence[Prompt], params: Params, raw: bool, trace: bool = False
    ) -> list[Request | tuple[int, RingkvError]]:
        if not self.prompts.is_batch(prompts):
            raise RingkvError("prompts: a list of prompts is needed here")
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RingkvError(f"params: {len(each)} given for {len(prompts)} prompts")
        prepared: list[Request | tuple[int, RingkvError]] = []
        for index, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
            try:
                prepared += self._prepare(prompt, param, index, raw, trace)
            except RingkvError as error:
                prepared.append((index, error))
        return prepared

    def _iterate(
        self, prepared: Iterable[Request | tuple[int, RingkvError]], trace: bool = False
    ) -> Generator[tuple[int, Completion], None, None]:
        requests = []
        for each in prepared:
            if isinstance(each, Request):
                requests.append(each)
            else:
                yield each[0], failure(self.about(), self.ring, each[1])
        with closing(self._run(requests, trace=trace)) as run:
            for request, event in run:
                if event.completion is not None:
                    yield request.index, event.completion

    def _events(
        self, requests: list[Request], on_prefill: Progress | None, trace: bool
    ) -> Generator[StreamEvent, None, None]:
        with closing(self._run(requests, on_prefill, trace)) as run:
            for _, event in run:
                yield event

    def _run(
        self, requests: list[Request], on_prefill: Progress | None = None, trace: bool = False
    ) -> Generator[tuple[Request, StreamEvent], None, None]:
        """What the loop serves, as events: one a piece of text, the last of a request with its completion."""
        with self._exclusive(), self._recorded(trace) as recorder:
            self._cancelled.clear()
            loop = Loop(self._runner, self._start, self._cancelled, self._limits)
            with closing(loop.run(requests, on_prefill)) as run:
                for served in run:
                    generation, ids = served.generation, served.token_ids
                    pieces = served.pieces or [(generation.channel, "")]
                    for place, (channel, text) in enumerate(pieces):
                        last = place == len(pieces) - 1 and generation.finish_reason is not None
                        done = self._completion(generation, recorder) if last else None
                        yield generation.request, StreamEvent(text, channel, [] if place else ids, done)

    @contextmanager
    def _recorded(self, trace: bool) -> Iterator[Recorder | None]:
        """A recorder that observes the ring, where a trace is wanted."""
        if not trace:
            yield None
            return
        self.ring.observers.append(recorder := Recorder(self.ring))
        try:
            yield recorder
        finally:
            self.ring.observers.remove(recorder)

    def _completion(self, generation: Generation, recorder: Recorder | None) -> Completion:
        return completion(self.about(), self.ring, generation, _record(recorder, generation))

    def _start(self, request: Request, lane: int) -> Generation:
        return Generation(request, lane, self.prompts.decoder())

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time: another thread waits; the same thread, inside an open stream, is refused."""
        me = threading.get_ident()
        if self._holder == me:
            raise RingkvError(
                "engine: a stream or iterator of this engine is still open in this thread; close it first"
            )
        with self._lock:
            if self._closed:
                raise RingkvError("engine: it is closed")
            self._holder = me
            try:
                yield
            finally:
                self._holder = None

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


def _record(recorder: Recorder | None, generation: Generation) -> Record | None:
    """What became of a request's tokens; None where nobody asked or its prompt was not read."""
    if recorder is None or not generation.retained:
        return None
    request = generation.request
    return recorder.record(generation.lane, request.ids, generation.tokens, request.pin)


def _one(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RingkvError.bad("params", params, "a SamplingParams")
    return params


def _check_options(ring: object, lanes: object, backend: object, seed: object, threads: object) -> None:
    if ring is not None and not isinstance(ring, RingConfig):
        raise RingkvError.bad("ring", ring, "a RingConfig")
    check_count("lanes", lanes, LANE_LIMIT)
    if threads is not None:
        check_int("threads", threads, 1, 1024)
    check(backend)
    SamplingParams(seed=seed)  # type: ignore[arg-type]
