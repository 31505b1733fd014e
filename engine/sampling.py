"""From SamplingParams to what a lane really samples with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringkv.engine.config import SamplingParams
from ringkv.engine.ring import Ring
from ringkv.kernels.philox import TOKEN, philox, to_uniform
from ringkv.kernels.sample import GREEDY_BELOW, Filters, sample

DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "max_tokens": 32768}


@dataclass(frozen=True)
class Sampling:
    """Effective values of one request, each with where it came from.

    Attributes:
        values: name -> value.
        sources: name -> "user", "generation_config", "default" or "ring".
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def resolve(cls, params: SamplingParams, generation_config: Mapping[str, Any]) -> Sampling:
        """The user's value, else the checkpoint's, else the default.

        Where generation_config says ``do_sample: false``, its temperature and the like are not in force.
        """
        values, sources = {}, {}
        theirs = {name: value for name, value in generation_config.items() if value is not None}
        sampled = theirs.get("do_sample") is not False
        for name, default in DEFAULTS.items():
            value, source = getattr(params, name), "user"
            if value is None and sampled and name in theirs and name != "max_tokens":
                value, source = theirs[name], "generation_config"
                SamplingParams(**{name: value})
            if value is None:
                value, source = default, "default"
            values[name], sources[name] = value, source
        return cls(values, sources)

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest."""
        return self.values["temperature"] < GREEDY_BELOW

    def limited(self, max_tokens: int) -> Sampling:
        """The same with ``max_tokens`` that the ring allows."""
        return Sampling({**self.values, "max_tokens": max_tokens}, {**self.sources, "max_tokens": "ring"})

    def report(self) -> dict[str, dict[str, Any]]:
        """name -> {value, source}."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}


class Sampler:
    """The sampling state of every lane, on the device.

    Args:
        lanes: how many.
        vocabulary: ids that may be drawn; the rest of a padded vocabulary never is.
        device: where.
    """

    def __init__(self, lanes: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._values: list[Mapping[str, Any]] = [{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}] * lanes
        self._device = device
        self._build()

    def set(self, lane: int, sampling: Sampling) -> None:
        """What a lane samples with from now on."""
        self._values[lane] = sampling.values
        self._build()

    def _build(self) -> None:
        def tensor(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([values[name] for values in self._values], dtype=dtype, device=self._device)

        self._temperature = tensor("temperature", torch.float32)
        self._greedy = all(values["temperature"] < GREEDY_BELOW for values in self._values)
        self._top_k = tensor("top_k", torch.int64) if any(values["top_k"] for values in self._values) else None
        self._top_p = tensor("top_p", torch.float32) if any(values["top_p"] < 1 for values in self._values) else None
        self._min_p = tensor("min_p", torch.float32) if any(values["min_p"] for values in self._values) else None

    def draw(self, logits: Tensor, ring: Ring, lanes: Sequence[int] | None = None) -> Tensor:
        """The token at position ``ring.seen`` of each lane, int64 [b], from logits [b, V]; -1 for a row not finite.

        Args:
            lanes: the lanes that the rows belong to; None for all in order.
        """
        logits = logits[:, : self.vocabulary]
        if self._greedy:
            return sample(logits, None, None)
        at: Any = slice(None) if lanes is None else torch.tensor(lanes, device=self._device)
        counter = TOKEN + 256 * ring.sample[at]
        uniform = to_uniform(philox(ring.seed[at], ring.seen[at], 0, 0, counter)[0])
        top_k, top_p, min_p = (None if x is None else x[at] for x in (self._top_k, self._top_p, self._min_p))
        return sample(logits, Filters(self._temperature[at], top_k, top_p, min_p), uniform)
