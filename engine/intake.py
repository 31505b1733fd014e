"""What callers hand in: prompts, and snapshots to go on from, as requests that the loop serves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias

from ringkv.engine.accept import accept, check_lane
from ringkv.engine.completion import Completion
from ringkv.engine.config import SamplingParams
from ringkv.engine.prompts import Prompts
from ringkv.engine.record import check_countable
from ringkv.engine.request import Request
from ringkv.engine.runner import Runner
from ringkv.engine.snapshot import Snapshot
from ringkv.errors import RingkvError

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class Intake:
    """Makes requests of what an engine is given, and refuses what it cannot serve.

    Args:
        prompts: prepares texts, messages and token ids.
        runner: gives what snapshots are gone on with. It is asked each time: a closed engine must hold nothing of it.
        about: what snapshots of this engine say of it.
        refused: what a prompt among many that is refused comes to.
    """

    def __init__(
        self,
        prompts: Prompts,
        runner: Callable[[], Runner],
        about: Callable[[], Mapping[str, Any]],
        refused: Callable[[Exception], Completion],
    ) -> None:
        self._prompts, self._runner, self._about, self._refused = prompts, runner, about, refused

    def load(self, path: str | os.PathLike[str]) -> Snapshot:
        """Read the file of a snapshot. Its sizes are compared before its tensors are read."""
        snapshot = Snapshot.load(path, self._accept)
        check_lane(snapshot, self._runner(), self._prompts.config.vocab_size)
        return snapshot

    def requests(
        self,
        prompt: object,
        params: object,
        index: int,
        raw: bool,
        trace: bool,
        begun: Sequence[int] = (),
        reads: bool = False,
    ) -> list[Request]:
        """The requests of one prompt, one a sample.

        Args:
            begun: see ``Engine.stream``.
            reads: see ``Prompts.prepare``.

        Raises:
            RingkvError: a prompt, a snapshot or parameters that are not accepted, by name.
        """
        if isinstance(prompt, Snapshot):
            return self._resumed(prompt, params, index, trace, begun, reads)
        requests = self._prompts.prepare(prompt, _one(params), index=index, raw=raw, begun=begun, reads=reads)
        if trace:
            config, request = self._runner().ring.config, requests[0]
            read = min(len(request.ids), config.capacity) + request.sampling.values["max_tokens"]
            check_countable((read - config.budget_tokens) // config.window if config.policy.evicts else 0)
        return requests

    def waves(
        self, prompts: Iterable[Any], params: Params | Iterator[SamplingParams], raw: bool, trace: bool
    ) -> Iterator[tuple[int, list[Request] | Completion]]:
        """The index of each of many prompts, and its requests, prepared one prompt at a time.

        Args:
            params: for all, or one for each prompt.

        Raises:
            RingkvError: what is no list of prompts, at once, or a wrong number of params. A prompt that is refused is
                its own affair.
        """
        if not isinstance(prompts, Iterator) and not self._prompts.is_batch(prompts):
            raise RingkvError("prompts: a list of prompts is needed here")
        if isinstance(params, (list, tuple)):
            if isinstance(prompts, Sequence) and len(params) != len(prompts):
                raise RingkvError(f"params: {len(params)} given for {len(prompts)} prompts")
            params = iter(params)
        return self._waves(prompts, params if isinstance(params, Iterator) else repeat(params), raw, trace)

    def _waves(
        self, prompts: Iterable[Any], each: Iterator[object], raw: bool, trace: bool
    ) -> Iterator[tuple[int, list[Request] | Completion]]:
        for index, prompt in enumerate(prompts):
            try:
                params = next(each)
            except StopIteration:
                raise RingkvError(f"params: {index} given for more prompts") from None
            wave: list[Request] | Completion
            try:
                wave = self.requests(prompt, params, index, raw, trace)
            except Exception as error:
                wave = self._refused(error)
            yield index, wave

    def _accept(self, snapshot: Snapshot) -> list[str]:
        return accept(snapshot, self._about(), self._runner())

    def _resumed(
        self, snapshot: Snapshot, params: object, index: int, trace: bool, begun: Sequence[int], reads: bool
    ) -> list[Request]:
        if trace or begun:
            name = "trace" if trace else "begun"
            raise RingkvError(f"{name}: a snapshot cannot be gone on with by it; accepted is none")
        differs = self._accept(snapshot)
        if snapshot.source is not None:
            check_lane(snapshot, self._runner(), self._prompts.config.vocab_size)
        requests = self._prompts.resumed(snapshot, None if params is None else _one(params), index, reads)
        return [dataclasses.replace(each, warnings=[*each.warnings, *differs]) for each in requests]


def one_sample(params: object) -> object:
    """Parameters of a stream, which has one sample."""
    if isinstance(params, SamplingParams) and params.n > 1:
        raise RingkvError(f"stream: n = {params.n} samples; accepted is 1 (use generate)")
    return params


def _one(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RingkvError.bad("params", params, "a SamplingParams")
    return params
