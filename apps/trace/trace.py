"""What the ring remembered of one request: where every token went, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ringkv.engine import DROPPED, LIVE, PREFILL, Completion, Engine, Record, describe
from ringkv.errors import RingkvError, is_int, naming
from ringkv.files import write_whole

FORMAT, VERSION = "ringkv-trace", "1"
_ARRAYS = {"token_ids": (np.int32, 1), "taken": (np.uint16, 3), "v_range": (np.float16, 3), "evicted_at": (np.int32, 2)}


@dataclass(frozen=True, eq=False)
class Trace(Record):
    """A record with all that a reader wants to know beside it.

    Attributes:
        texts: of the N tokens; joined they are the decoded text. A character of several tokens is its last one's, and a
            special token's is "". Without a tokenizer each is its id in brackets.
        special: the names of the special tokens among them, by id.
        repetition: the loop that was found, {unit, period, count}, or None.
    """

    texts: list[str]
    special: dict[str, str]
    model: str
    policy: str
    budget: int
    window: int
    sinks: int
    retention: str
    seed: int
    sample: int
    finish_reason: str
    repetition: dict[str, Any] | None

    @classmethod
    def of(cls, engine: Engine, done: Completion) -> Trace:
        """The trace of a completion of this engine that was asked for with ``trace=True``.

        Raises:
            RingkvError: its prompt was never read, or no trace was asked for.
        """
        if done.trace is None:
            raise RingkvError("trace: this completion has none; ask for it with trace=True")
        arrays = {field.name: getattr(done.trace, field.name) for field in dataclasses.fields(Record)}
        texts, special = engine.prompts.texts(arrays["token_ids"].tolist())
        return cls(
            **arrays,
            texts=texts,
            special=special,
            model=done.model,
            policy=describe(engine.ring.policy),
            budget=done.ring["budget"],
            window=done.ring["window"],
            sinks=engine.ring.config.sinks,
            retention=done.ring["retention"],
            seed=done.ring["seed"],
            sample=done.sample,
            finish_reason=done.finish_reason,
            repetition=done.repetition,
        )

    @property
    def policy_name(self) -> str:
        """The policy without its fields; one of the user's own has a colon in its name."""
        return self.policy.rpartition(":")[0] if "=" in self.policy else self.policy

    def loop(self) -> tuple[int, int] | None:
        """Where the loop stands last, as a span of positions; None if there is none."""
        if self.repetition is None:
            return None
        length = self.repetition["period"] * self.repetition["count"]
        looped = np.tile(np.array(self.repetition["unit"], np.int32), self.repetition["count"])
        for end in range(len(self.token_ids), self.prompt_tokens + length - 1, -1):
            if np.array_equal(self.token_ids[end - length : end], looped):
                return end - length, end
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: the arrays, and everything else as JSON in its metadata.

        Raises:
            RingkvError: it cannot be written.
        """
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in _ABOUT}
        metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about)}
        write_whole(Path(path), save(arrays, metadata), "trace")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what ``save`` wrote; nothing in it is trusted.

        Raises:
            RingkvError: it cannot be read, or it is not a whole trace.
        """
        broken = "it is no whole safetensors file with JSON in it"
        with naming(f"trace {str(path)!r}", broken, (SafetensorError, ValueError, RecursionError)):
            if os.path.isdir(path):
                raise RingkvError("it is a folder; accepted is what generate --trace wrote")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise RingkvError("it is no trace; accepted is what generate --trace wrote")
                if metadata.get("version") != VERSION:
                    raise RingkvError.bad("version", metadata.get("version"), VERSION)
                if set(file.keys()) != set(_ARRAYS):
                    raise RingkvError.bad("tensors", sorted(file.keys()), ", ".join(sorted(_ARRAYS)))
                about = _checked(json.loads(metadata.get("about", "null")))
                trace = cls(**{key: file.get_tensor(key) for key in _ARRAYS}, **about)
            _check(trace)
            return trace


def spread(numbers: list[int]) -> str:
    """One number, or the least and the greatest."""
    few, many = min(numbers), max(numbers)
    return str(few) if few == many else f"{few} to {many}"


def _of_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _natural(value: Any) -> bool:
    return is_int(value) and value >= 0


def _loop(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"unit", "period", "count"} or not isinstance(value["unit"], list):
        return value is None
    ids = all(_natural(id) and id < 2**31 for id in value["unit"])
    return ids and _natural(value["count"]) and value["period"] == len(value["unit"]) > 0


_ABOUT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "texts": (lambda value: isinstance(value, list) and _of_texts(value), "a list of texts"),
    "special": (lambda value: isinstance(value, dict) and _of_texts(value.values()), "an object of texts"),
    **dict.fromkeys(
        ("model", "policy", "retention", "finish_reason"), (lambda value: isinstance(value, str), "a text")
    ),
    **dict.fromkeys(("prompt_tokens", "budget", "window", "sinks", "pin", "seed", "sample"), (_natural, "an int >= 0")),
    "repetition": (_loop, "null, or a unit of ids with its period and count"),
}


def _checked(about: Any) -> dict[str, Any]:
    """The fields that are no arrays, each of its kind."""
    if not isinstance(about, dict) or set(about) != set(_ABOUT):
        given = sorted(about) if isinstance(about, dict) else about
        raise RingkvError.bad("about", given, f"an object of {', '.join(sorted(_ABOUT))}")
    for name, (fits, accepted) in _ABOUT.items():
        if not fits(about[name]):
            raise RingkvError.bad(name, about[name], accepted)
    return about


def _check(trace: Trace) -> None:
    """Refuse arrays that do not belong together, so that whoever draws them need not ask."""
    for name, (dtype, dims) in _ARRAYS.items():
        array = getattr(trace, name)
        if array.dtype != dtype or array.ndim != dims:
            raise RingkvError.bad(name, f"{array.dtype} {list(array.shape)}", f"{np.dtype(dtype)} of {dims} dimensions")
    taken, evicted_at, prompt = trace.taken, trace.evicted_at, trace.prompt_tokens
    layers, heads, seen = taken.shape
    total = len(trace.token_ids)
    if not (layers and heads and 1 <= prompt <= seen <= total):
        raise RingkvError(f"taken: {list(taken.shape)} does not fit {total} tokens, {prompt} of them the prompt's")
    if trace.v_range.shape != taken.shape:
        raise RingkvError.bad("v_range", list(trace.v_range.shape), f"the shape of taken, {list(taken.shape)}")
    if len(trace.texts) != total:
        raise RingkvError(f"texts: {len(trace.texts)} for {total} tokens")
    times = evicted_at > 0
    ascending = (np.diff(evicted_at.astype(np.int64), axis=1) > 0) | ~times[:, 1:]
    inside = ~times | (evicted_at > prompt) & (evicted_at <= seen)
    if len(evicted_at) != layers or evicted_at.shape[1] >= DROPPED or (np.diff(times, axis=1) & times[:, 1:]).any():
        raise RingkvError(f"evicted_at: {list(evicted_at.shape)} is no list of evictions for each of {layers} layers")
    if not (ascending.all() and inside.all() and (evicted_at >= 0).all()):
        raise RingkvError(f"evicted_at: accepted are ascending counts from {prompt + 1} to {seen}, then zeros")
    known = np.zeros((layers, LIVE + 1), bool)
    known[:, [PREFILL, DROPPED, LIVE]] = True
    known[:, 1 : evicted_at.shape[1] + 1] = times
    born = (trace.left_at() > np.arange(seen)) | (np.arange(seen) < prompt)
    if not (known[np.arange(layers)[:, None, None], taken].all() and born.all()):
        raise RingkvError("taken: it names an eviction that did not happen, or one before its token was read")
