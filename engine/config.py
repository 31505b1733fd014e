"""The two option objects of the API: how the ring is made, and how a request is sampled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ringkv.engine.policies import Policy, as_policy
from ringkv.engine.retention import Retention, as_retention
from ringkv.errors import RingkvError

PINS = ("none", "system", "prompt")


@dataclass(frozen=True)
class RingConfig:
    """The KV ring: its size, and what stays in it.

    Attributes:
        budget: tokens kept a KV head right after an eviction.
        window: the most recent tokens, never evicted; also how many victims one eviction takes.
        policy: which tokens leave: a name, ``"name:field=value,..."``, or a ``Policy``.
        retention: what of a prompt enters: ``"refreekv"``, ``"all"``, the same with fields, or an object. ``full``
            implies "all".
        sinks: the first tokens of the text, always kept.
        pin: a span always kept: "none", "system" (the system message) or "prompt" (the whole prompt).

    Raises:
        RingkvError: a value that is not accepted, by name.
    """

    budget: int = 4096
    window: int = 64
    policy: str | Policy = "vase-attnv"
    retention: str | Retention | None = None
    sinks: int = 4
    pin: str = "none"

    def __post_init__(self) -> None:
        for field, least in (("budget", 1), ("window", 1), ("sinks", 0)):
            _check_int(field, getattr(self, field), least)
        if self.pin not in PINS:
            raise RingkvError.bad("pin", self.pin, ", ".join(PINS))
        policy = as_policy(self.policy)
        retention = self.retention
        if retention is None:
            retention = "refreekv" if policy.evicts else "all"
        retention = as_retention(retention)
        if not policy.evicts and retention.name != "all":
            raise RingkvError(f"retention = {retention.name!r} with policy {policy.name!r}: accepted is 'all'")
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "retention", retention)
        if policy.evicts:
            self.check_protected(self.sinks, "sinks")

    @property
    def capacity(self) -> int:
        """Slots a KV head: budget + window."""
        return self.budget + self.window

    def check_protected(self, protected: int, what: str) -> None:
        """Refuse a protected head of the text that leaves no candidate to evict."""
        if protected + self.window >= self.budget:
            raise RingkvError(
                f"{what} ({protected}) + window ({self.window}) = {protected + self.window} is not below budget "
                f"({self.budget}): nothing would be left to evict; raise budget or lower window"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. None: generation_config's value, else the default.

    Attributes:
        temperature: 0 (or below 1e-5) is argmax. Default 0.6.
        top_p: the smallest set of most likely tokens that reaches it. Default 0.95.
        top_k: only the k most likely tokens; 0 is off. Default 0.
        min_p: only tokens at least this share as likely as the likeliest. Default 0.
        seed: the noise of the request, any int of 64 bits.
        max_tokens: a finite limit, always. Default 32768; under ``full`` what fits.
        ignore_eos: go on after an end-of-text token.

    Raises:
        RingkvError: a value that is not accepted, by name.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 1e6)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        for field, least in (("top_k", 0), ("max_tokens", 1)):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), least)
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**64):
            raise RingkvError.bad("seed", self.seed, "an int of 64 bits")
        if not isinstance(self.ignore_eos, bool):
            raise RingkvError.bad("ignore_eos", self.ignore_eos, "true or false")

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(field: str, value: object, least: int) -> None:
    if not _is_int(value) or value < least:  # type: ignore[operator]
        raise RingkvError.bad(field, value, f"an int >= {least}")


def _check_number(field: str, value: object, low: float, high: float) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise RingkvError.bad(field, value, f"a number from {low:g} to {high:g}")
