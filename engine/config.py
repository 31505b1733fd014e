"""The options of the API: how the ring is made, and how a request is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringkv.engine.policies import Policy, as_policy
from ringkv.engine.retention import Retention, as_retention
from ringkv.errors import RingkvError, check_count, check_int, check_number, is_int

PINS = ("none", "system", "prompt")
LANE_LIMIT = 1 << 16  # an engine keeps some counts a lane in Python, and plan makes them too
ON_REPETITION = ("stop", "close_thought", "ignore")


@dataclass(frozen=True, init=False)
class RingConfig:
    """The KV ring: its size, and what stays in it.

    Attributes:
        budget: tokens kept a KV head right after an eviction; "auto": the engine takes the largest that fits the
            memory, up to 16384.
        window: the most recent tokens, never evicted; also how many victims one eviction takes.
        policy: which tokens leave. It is given as a name, as ``"name:field=value,..."``, as ``"module:Class"`` (a class
            of your own, with ``":field=value,..."`` after it where it has fields), or as a ``Policy``.
        retention: what of a prompt enters: ``"refreekv"``, ``"all"``, the same with fields, or a ``Retention``. None is
            "refreekv", and "all" under ``full``, which takes nothing else.
        sinks: the first tokens of the text, always kept.
        pin: a span always kept: "none", "system" (the system message) or "prompt" (the whole prompt).

    Raises:
        RingkvError: a value that is not accepted, by name.

    >>> RingConfig(budget=128, window=32, policy="rkv:lam=0.2").capacity
    160
    >>> RingConfig(budget=32, window=32)
    Traceback (most recent call last):
    ringkv.errors.RingkvError: sinks (4) + window (32) = 36 is not below budget (32): nothing would be left ...
    """

    budget: int | Literal["auto"]
    window: int
    policy: Policy
    retention: Retention
    sinks: int
    pin: str

    def __init__(
        self,
        budget: int | Literal["auto"] = 4096,
        window: int = 64,
        policy: str | Policy = "vase-attnv",
        retention: str | Retention | None = None,
        sinks: int = 4,
        pin: str = "none",
    ) -> None:
        check_count("budget", budget)
        check_int("window", window, 1)
        check_int("sinks", sinks, 0)
        if pin not in PINS:
            raise RingkvError.bad("pin", pin, ", ".join(PINS))
        policy = as_policy(policy)
        retention = as_retention(retention if retention is not None else "refreekv" if policy.evicts else "all")
        if not policy.evicts and retention.name != "all":
            raise RingkvError(f"retention = {retention.name!r} with policy {policy.name!r}: accepted is 'all'")
        # Not by assignment: the dataclass is frozen.
        vars(self).update(budget=budget, window=window, policy=policy, retention=retention, sinks=sinks, pin=pin)
        if policy.evicts and budget != "auto":
            self.check_protected(sinks, "sinks")

    @property
    def capacity(self) -> int:
        """Slots a KV head: budget + window."""
        return self.budget_tokens + self.window

    @property
    def budget_tokens(self) -> int:
        """The budget as a number; an engine has chosen it where it was "auto"."""
        if isinstance(self.budget, str):
            raise RingkvError("budget = 'auto': an engine chooses it; a ring needs an int")
        return self.budget

    @property
    def least_budget(self) -> int:
        """The smallest budget that leaves something to evict; 1 where nothing is evicted."""
        return self.sinks + self.window + 1 if self.policy.evicts else 1

    def check_protected(self, protected: int, what: str) -> None:
        """Refuse a protected head of the text that leaves no candidate to evict."""
        if protected + self.window >= self.budget_tokens:
            raise RingkvError(
                f"{what} ({protected}) + window ({self.window}) = {protected + self.window} is not below budget "
                f"({self.budget}): nothing would be left to evict; raise budget or lower window"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. None: generation_config's value, else the default.

    Where ``min_tokens`` is 0 or ``stop`` is empty, generation_config's value holds too.

    Attributes:
        temperature: 0 (or below 1e-5) is argmax. Default 0.6.
        top_p: the smallest set of most likely tokens that reaches it. Default 0.95.
        top_k: only the k most likely tokens; 0 is off. Default 0.
        min_p: only tokens at least this share as likely as the likeliest. Default 0.
        repetition_penalty: divides positive and multiplies negative logits of ids seen in prompt or output. Default 1.
        presence_penalty: subtracted from the logits of ids seen in the output. Default 0.
        logit_bias: token id -> what is added to its logit.
        seed: the noise of the request, any int of 64 bits.
        n: samples of one prompt.
        max_tokens: a finite limit, always. Default 32768; under ``full`` what fits.
        min_tokens: no ending token is drawn before.
        stop: strings that end the text, in thought and answer; the text is cut before them.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after the model's own ending tokens, and after generation_config's stop strings.
        logprobs: report this many of the likeliest tokens at each place; 0 reports the drawn one alone.
            One that was put into the answer has an entry without: its logprob is None.
        thinking: True, False or "auto"; goes to the chat template. A prompt without one (raw, or ids) begins a thought
            where it ends with the opening tag; with True, also where its last tag opens further up.
        max_thinking_tokens: the thought is closed after so many tokens.
        thinking_message: what is written before it is closed.
        on_repetition: "stop", "close_thought" or "ignore".
        min_repeat_count, min_repeat_span: a repetition is a unit at least so many times, over at least so many tokens.

    Raises:
        RingkvError: a value that is not accepted, by name.

    >>> SamplingParams(temperature=0, stop="###").replace(seed=7).stop
    ('###',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ringkv.errors.RingkvError: top_p = 1.5: accepted is a number from 0 to 1
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    thinking: bool | str = "auto"
    max_thinking_tokens: int | None = None
    thinking_message: str = ""
    on_repetition: str = "stop"
    min_repeat_count: int = 4
    min_repeat_span: int = 512

    def __post_init__(self) -> None:
        for field, low, high in (
            ("temperature", 0, 1e6),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-3, 1e3),
            ("presence_penalty", -1e3, 1e3),
        ):
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field), low, high)
        check_int("n", self.n, 1, 1 << 16)
        for field, least in (("min_tokens", 0), ("min_repeat_count", 3), ("min_repeat_span", 1)):
            check_int(field, getattr(self, field), least)
        for field, least in (("top_k", 0), ("max_tokens", 1), ("logprobs", 0), ("max_thinking_tokens", 0)):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field), least)
        if self.seed is not None and not (is_int(self.seed) and -(2**63) <= self.seed < 2**64):
            raise RingkvError.bad("seed", self.seed, "an int of 64 bits")
        if not isinstance(self.ignore_eos, bool):
            raise RingkvError.bad("ignore_eos", self.ignore_eos, "true or false")
        if self.thinking is not True and self.thinking is not False and self.thinking != "auto":
            raise RingkvError.bad("thinking", self.thinking, "true, false or 'auto'")
        if not isinstance(self.thinking_message, str):
            raise RingkvError.bad("thinking_message", self.thinking_message, "a text")
        if self.on_repetition not in ON_REPETITION:
            raise RingkvError.bad("on_repetition", self.on_repetition, ", ".join(ON_REPETITION))
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(each, str) and each for each in stop):
            raise RingkvError.bad("stop", self.stop, "a text or a list of texts, none of them empty")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(is_int(each) and each >= 0 for each in ids):
            raise RingkvError.bad("stop_token_ids", ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RingkvError.bad("logit_bias", self.logit_bias, "token ids with numbers")
        bias = {}
        for token, value in self.logit_bias.items():
            # JSON has no integer keys.
            token = int(token) if isinstance(token, str) and token.isdecimal() else token
            if not is_int(token) or token < 0:
                raise RingkvError.bad("logit_bias", token, "token ids with numbers")
            check_number(f"logit_bias of {token}", value, -1e4, 1e4)
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
