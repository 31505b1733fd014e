"""The sampling values that are in force for a request, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringkv.engine.config import SamplingParams
from ringkv.errors import RingkvError
from ringkv.kernels.sample import GREEDY_BELOW

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
    "max_thinking_tokens",
    "thinking_message",
    "on_repetition",
    "min_repeat_count",
    "min_repeat_span",
)


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
        never are: those are for the ring and the user to say.
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
