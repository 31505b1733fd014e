"""From SamplingParams to what a lane really samples with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringkv.engine.config import SamplingParams
from ringkv.engine.ring.storage import Ring
from ringkv.errors import RingkvError
from ringkv.kernels.penalize import penalize
from ringkv.kernels.philox import TOKEN, philox, to_uniform
from ringkv.kernels.sample import GREEDY_BELOW, Filters, sample

DEFAULTS: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "max_tokens": 32768,
}
# What else a request carries is the user's or SamplingParams' own default.
OTHERS: tuple[str, ...] = (
    "logit_bias",
    "n",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "thinking",
)
OTHERS += ("max_thinking_tokens", "thinking_message", "on_repetition", "min_repeat_count", "min_repeat_span")


_AHEAD = 64  # positions that noise is made for at once


@dataclass(frozen=True)
class Sampling:
    """Effective values of one request, each with where it came from.

    Attributes:
        values: name -> value, every field of SamplingParams but the seed.
        sources: name -> "user", "generation_config", "default" or "ring".
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def resolve(cls, params: SamplingParams, generation_config: Mapping[str, Any]) -> Sampling:
        """The user's value, else the checkpoint's, else the default.

        Where generation_config says ``do_sample: false``, its temperature and the like are not in force. Its lengths
        never are: they are the ring's matter and the user's.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        theirs = {} if generation_config.get("do_sample") is False else generation_config
        for name, default in DEFAULTS.items():
            value, source = getattr(params, name), "user"
            if value is None and theirs.get(name) is not None and name != "max_tokens":
                value, source = theirs[name], "generation_config"
                try:
                    SamplingParams(**{name: value})
                except RingkvError as error:
                    raise RingkvError(f"generation_config.json: {error}; give {name} yourself") from None
            if value is None:
                value, source = default, "default"
            values[name], sources[name] = value, source
        untouched = SamplingParams()
        for name in OTHERS:
            values[name] = getattr(params, name)
            sources[name] = "default" if values[name] == getattr(untouched, name) else "user"
        return cls(values, sources)

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest."""
        return self.values["temperature"] < GREEDY_BELOW

    def limited(self, max_tokens: int) -> Sampling:
        """The same with the ``max_tokens`` that the ring allows."""
        return Sampling({**self.values, "max_tokens": max_tokens}, {**self.sources, "max_tokens": "ring"})

    def report(self) -> dict[str, dict[str, Any]]:
        """name -> {value, source}."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


# What an unused lane samples with: every stage off.
_OFF = Sampling.resolve(SamplingParams(temperature=0, top_p=1), {})


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
        self._lanes = [_OFF.values] * lanes
        self._columns: dict[str, Tensor] = {}
        self._prompt = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._bias: Tensor | None = None
        self._forbidden: list[int] = []
        self._in_prompt: Tensor | None = None
        self._in_output: Tensor | None = None
        self._ending: Tensor | None = None
        self._left = 0  # draws that the noise made ahead is still good for
        self._ahead: Tensor  # [B, _AHEAD], from position self._since [B] on
        self._since: Tensor
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
        wanted = [values["logprobs"] for values in self._lanes if values["logprobs"] is not None]
        return max(wanted, default=None)

    def forbid(self, ids: Iterable[int]) -> None:
        """Never draw these ids in a lane that is set from now on: their bias is -inf, whatever a request's is."""
        self._forbidden = [id for id in ids if id < self.vocabulary]
        if self._forbidden:
            self._bias = self._table(self._bias, torch.float32)

    def set(self, lane: int, sampling: Sampling, prompt: Sequence[int] = (), ending: Iterable[int] = ()) -> None:
        """What a lane samples with from now on.

        Args:
            prompt: its ids, for the repetition penalty and min_tokens.
            ending: ids that end the text, for min_tokens.
        """
        values = self._lanes[lane] = sampling.values
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
        if self._ending is not None:
            self._ending[lane, self._ids(ending)] = True
        self._build()

    def draw(self, logits: Tensor, ring: Ring, lanes: Sequence[int] | None = None) -> Tensor:
        """The token at position ``ring.seen`` of each lane, int64 [b], from logits [b, V]; -1 for a row not finite.

        Args:
            lanes: the lanes that the rows belong to; None for all in order.
        """
        at: Any = slice(None) if lanes is None else torch.tensor(lanes, device=self._device)

        def of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[at]

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
        if self._static or lanes is not None:
            uniform = _uniform(ring.seed[at], ring.seen[at], ring.sample[at])
            self._left = 0
        else:
            uniform = self._next_uniform(ring)
        filters = Filters(self._temperature[at], of(self._top_k), of(self._top_p), of(self._min_p), self._any_greedy)
        return sample(penalized, filters, uniform)

    def _next_uniform(self, ring: Ring) -> Tensor:
        """The noise of position ``seen`` of every lane, float32 [B], made for some positions at once: philox is a
        hundred small operations, whatever it is made for.

        From draw to draw a lane's ``seen`` grows by one or, where it does not run, stays; a request that comes into a
        lane is drawn for by name first.
        """
        if self._left == 0:
            self._left, self._since = _AHEAD, ring.seen.clone()
            ahead = self._since[:, None] + torch.arange(_AHEAD, device=self._device)
            self._ahead = _uniform(ring.seed[:, None], ahead, ring.sample[:, None])
        self._left -= 1
        at = (ring.seen - self._since).clamp(0, _AHEAD - 1)  # out of it is only a lane that does not run
        return self._ahead.gather(1, at[:, None])[:, 0]

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
        greedy = [values["temperature"] < GREEDY_BELOW for values in self._lanes]
        self._greedy, self._any_greedy = not self._static and all(greedy), self._static or any(greedy)
        self._top_k = self._used("top_k", torch.int64, off=0)
        self._top_p = self._used("top_p", torch.float32, off=1)
        self._min_p = self._used("min_p", torch.float32, off=0)
        self._repetition = self._used("repetition_penalty", torch.float32, off=1)
        self._presence = self._used("presence_penalty", torch.float32, off=0)

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        values = torch.tensor([values[name] for values in self._lanes], dtype=dtype)
        column = self._columns.setdefault(name, torch.empty_like(values, device=self._device))
        return column.copy_(values)

    def _used(self, name: str, dtype: torch.dtype, off: float) -> Tensor | None:
        used = self._static or any(values[name] != off for values in self._lanes)
        return self._column(name, dtype) if used else None

    def _table(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is not None:
            return table
        return torch.zeros(len(self._lanes), self.vocabulary, dtype=dtype, device=self._device)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        known = [each for each in ids if each < self.vocabulary]
        return torch.tensor(known, dtype=torch.int64, device=self._device)


def _uniform(seed: Tensor, position: Tensor, sample: Tensor) -> Tensor:
    """float32 in (0, 1) of a request's key, the position that is drawn, and the sample's index."""
    return to_uniform(philox(seed, position, 0, 0, TOKEN + 256 * sample)[0])
