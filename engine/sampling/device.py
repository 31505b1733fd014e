"""What every lane samples with, on the device, and the draw itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ringkv.engine.config import SamplingParams
from ringkv.engine.sampling.values import Sampling
from ringkv.kernels.philox import TOKEN, to_uniform
from ringkv.kernels.sample import Filters
from ringkv.kernels.table import penalize, philox, sample

# What an unused lane samples with: every stage off.
_OFF = Sampling.resolve(SamplingParams(temperature=0, top_p=1), {})


class Noise(Protocol):
    """What the noise of a draw follows from, int64 [B] each; a ring has them.

    Attributes:
        seed: the key of the request in each lane.
        seen: the position that is drawn.
        sample: which of the request's samples it is.
    """

    seed: Tensor
    seen: Tensor
    sample: Tensor


class Sampler:
    """The sampling state of every lane, on the device.

    A stage that no lane uses costs nothing: its tensors do not exist.

    Args:
        lanes: how many.
        vocabulary: ids that may be drawn; the rest of a padded vocabulary never is.
        device: where.
        static: every stage always runs, on tensors that never move: a captured step needs it.
    """

    def __init__(self, lanes: int, vocabulary: int, device: torch.device, static: bool = False) -> None:
        self.vocabulary, self._device, self._static = vocabulary, device, static
        self._lanes = [_OFF] * lanes
        self._columns: dict[str, Tensor] = {}
        self._prompt = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._bias: Tensor | None = None
        self._forbidden: list[int] = []
        self._not_first: list[int] = []
        self._in_prompt: Tensor | None = None
        self._in_output: Tensor | None = None
        self._ending: Tensor | None = None
        if static:
            self._bias = self._table(None, torch.float32)
            self._in_prompt, self._in_output, self._ending = (self._table(None, torch.bool) for _ in range(3))
        self._build()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; where it is static they never change."""
        tables = self._prompt, self._bias, self._in_prompt, self._in_output, self._ending
        return sum(table.nbytes for table in (*tables, *self._columns.values()) if table is not None)

    @property
    def logprobs(self) -> int | None:
        """The most likely tokens that any lane wants reported; None if no lane does."""
        wanted = [lane.values["logprobs"] for lane in self._lanes]
        return max((k for k in wanted if k is not None), default=None)

    def forbid(self, ids: Iterable[int], first: Iterable[int] = ()) -> None:
        """Never draw these ids in any lane: their bias is -inf, whatever a request's is.

        Args:
            first: ids that are not drawn as the first token of a text.
        """
        self._forbidden = [id for id in ids if id < self.vocabulary]
        self._not_first = list(first)
        if self._forbidden:
            self._bias = self._table(self._bias, torch.float32)

    def set(
        self,
        lane: int,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        ending: Iterable[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        """What a lane samples with from now on.

        Args:
            prompt: its ids, for the repetition penalty and min_tokens.
            ending: ids that end the text, for min_tokens.
            output: the tokens that its text has already.
        """
        self._lanes[lane], values = sampling, sampling.values
        self._prompt[lane] = len(prompt)
        if values["logit_bias"]:
            self._bias = self._table(self._bias, torch.float32)
        if values["repetition_penalty"] != 1:
            self._in_prompt = self._table(self._in_prompt, torch.bool)
        if values["repetition_penalty"] != 1 or values["presence_penalty"]:
            self._in_output = self._table(self._in_output, torch.bool)
        if values["min_tokens"]:
            self._ending = self._table(self._ending, torch.bool)
        for table in (self._bias, self._in_prompt, self._in_output, self._ending):
            if table is not None:
                table[lane] = 0
        if self._bias is not None:
            for token, value in (values["logit_bias"] or {}).items():
                self._bias[lane, token] = value
            self._bias[lane, self._forbidden] = -torch.inf
        if self._in_prompt is not None:
            self._in_prompt[lane, self._ids(prompt)] = True
        if self._in_output is not None and output:
            self._in_output[lane, self._ids(output)] = True
        if self._ending is not None:
            self._ending[lane, self._ids(ending)] = True
        self._build()

    def draw(self, logits: Tensor, ring: Noise, lanes: Sequence[int] | None = None, opens: bool = True) -> Tensor:
        """The token at position ``ring.seen`` of each lane, int64 [b], from logits [b, V]; -1 for a row not finite.

        Args:
            lanes: the lanes that the rows belong to; None for all in order.
            opens: whether these lanes draw the first tokens of their texts.
        """
        at: Any = slice(None) if lanes is None else torch.tensor(lanes, device=self._device)

        def of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[at]

        if lanes is not None and opens and self._not_first:
            logits = logits.index_fill(1, self._ids(self._not_first), -torch.inf)
        early = None
        if self._ending is not None:
            early = ring.seen[at] - self._prompt[at] < self._min_tokens[at]
        penalized = penalize(
            logits[:, : self.vocabulary],
            of(self._bias),
            of(self._repetition),
            of(self._presence),
            of(self._in_prompt),
            of(self._in_output),
            of(self._ending),
            early,
        )
        if self._greedy:
            return sample(penalized, None, None)
        uniform = to_uniform(philox(ring.seed[at], ring.seen[at], 0, 0, TOKEN + 256 * ring.sample[at])[0])
        filters = Filters(self._temperature[at], of(self._top_k), of(self._top_p), of(self._min_p), self._any_greedy)
        return sample(penalized, filters, uniform)

    def note(self, token: Tensor, lanes: Sequence[int] | None = None) -> None:
        """Remember the tokens [b] that were drawn, for the penalties on the output."""
        if self._in_output is not None:
            ids = token.clamp(min=0)
            if lanes is None:
                self._in_output.scatter_(1, ids[:, None], True)
            else:
                self._in_output[torch.tensor(lanes, device=self._device), ids] = True

    def _build(self) -> None:
        self._temperature = self._column("temperature", torch.float32)
        self._min_tokens = self._column("min_tokens", torch.int64)
        greedy = [lane.greedy for lane in self._lanes]
        self._greedy, self._any_greedy = not self._static and all(greedy), self._static or any(greedy)
        self._top_k = self._used("top_k", torch.int64, off=0)
        self._top_p = self._used("top_p", torch.float32, off=1)
        self._min_p = self._used("min_p", torch.float32, off=0)
        self._repetition = self._used("repetition_penalty", torch.float32, off=1)
        self._presence = self._used("presence_penalty", torch.float32, off=0)

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([lane.values[name] for lane in self._lanes], dtype=dtype)
        column = self._columns.setdefault(name, torch.empty_like(values, device=self._device))
        return column.copy_(values)

    def _used(self, name: str, dtype: torch.dtype, off: float) -> Tensor | None:
        used = self._static or any(lane.values[name] != off for lane in self._lanes)
        return self._column(name, dtype) if used else None

    def _table(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is not None:
            return table
        return torch.zeros(len(self._lanes), self.vocabulary, dtype=dtype, device=self._device)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        known = [each for each in ids if each < self.vocabulary]
        return torch.tensor(known, dtype=torch.int64, device=self._device)
