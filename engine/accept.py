"""Which snapshots an engine can go on from: of the same model and ring; and what a file holds must be a lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringkv.engine.ring.integrity import broken
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.snapshot import LOGITS, Snapshot
from ringkv.engine.spec import describe
from ringkv.errors import RingkvError

# Where one of these differs, the tables are none of this engine's; where one of the others does, tokens may differ.
_SAME = {"digest": "model digest", "budget": "budget", "window": "window", "sinks": "sinks", "policy": "policy"}
_NEAR = ("dtype", "backend", "device", "lanes")


def about_ring(ring: Ring) -> dict[str, Any]:
    """What a snapshot says of the ring that it comes from."""
    config = ring.config
    sizes = {"budget": config.budget, "window": config.window, "sinks": config.sinks}
    return {**sizes, "policy": describe(ring.policy), "kv_dtype": _name(ring.k.dtype), "lanes": ring.lanes}


def accept(snapshot: Snapshot, about: Mapping[str, Any], runner: Runner) -> list[str]:
    """Refuse a snapshot that an engine cannot go on from; returns warnings of what differs and may change tokens.

    Its tensors may lie on the meta device: only names, shapes and types are looked at.

    Args:
        about: of the engine, as its own snapshots say it.

    Raises:
        RingkvError: another model, ring size, policy or type of keys and values; or tensors that do not fit.
    """
    theirs = snapshot.about
    with_name = f"snapshot {snapshot.source!r}: " if snapshot.source is not None else "snapshot: "
    for name, word in _SAME.items():
        if theirs.get(name) != about[name]:
            raise RingkvError(f"{with_name}{word} is {theirs.get(name)!r}, and this engine's is {about[name]!r}")
    wanted = runner.lane(0)
    if LOGITS in snapshot.lane or not snapshot.tokens:
        dtype = torch.promote_types(runner.model.dtype, torch.float32)
        wanted[LOGITS] = torch.empty(1, runner.model.config.vocab_size, dtype=dtype, device="meta")
    if wanted.keys() != snapshot.lane.keys():
        name = min(wanted.keys() ^ snapshot.lane.keys())
        raise RingkvError(f"{with_name}tensor {name} is {'missing' if name in wanted else 'unknown'}")
    for name, own in wanted.items():
        given = snapshot.lane[name]
        if given.shape != own.shape:
            raise RingkvError(f"{with_name}tensor {name} is {[*given.shape]}; accepted is {[*own.shape]}")
        wider = own.is_floating_point() and torch.promote_types(given.dtype, own.dtype) == own.dtype
        if given.dtype != own.dtype and not wider:
            word = "kv dtype" if name in ("k", "v", "queries") else f"tensor {name}"
            raise RingkvError(f"{with_name}{word} is {_name(given.dtype)}, and this engine's is {_name(own.dtype)}")
    names = [name for name in (*_NEAR, "kv_dtype") if theirs.get(name) != about[name]]
    differs = [f"{name} {theirs.get(name)!r} is now {about[name]!r}" for name in names]
    return [f"resumed elsewhere: {', '.join(differs)}; tokens may differ from there on"] if differs else []


def check_lane(snapshot: Snapshot, runner: Runner, vocabulary: int) -> None:
    """Refuse a snapshot of a file whose tensors, in the right sizes, are no lane that a ring could have.

    Raises:
        RingkvError: naming the file and what cannot be.
    """
    ring, held = runner.ring, snapshot.lane
    unread = snapshot.unread
    read = len(snapshot.prompt) + len(snapshot.tokens) - len(unread)
    for name, ids in (("prompt", snapshot.prompt), ("tokens", snapshot.tokens)):
        if wrong := [id for id in ids if not 0 <= id < vocabulary]:
            raise _broken(snapshot, f"ids.{name} holds {wrong[0]}; accepted are 0 to {vocabulary - 1}")
    if not snapshot.prompt:
        raise _broken(snapshot, "ids.prompt is empty")
    if not ring.policy.evicts and bool((held["count"] != read).any()):
        raise _broken(snapshot, f"count differs from the {read} tokens that were read")
    for name, value in (("seen", read), ("pin", snapshot.pin), *(("next_token", token) for token in unread)):
        if int(held[name]) != value:
            raise _broken(snapshot, f"{name} is {int(held[name])}, and the header and the ids say {value}")
    if snapshot.pin > ring.config.sinks and ring.policy.evicts:
        ring.config.check_protected(snapshot.pin, f"snapshot {snapshot.source!r}: pinned tokens")
    problem = broken(ring.config, held) or runner.steering.broken(held, vocabulary)
    if problem is None and not all(x.isfinite().all() for x in _floats(held)):
        problem = "a table holds NaN or infinity"
    if problem is not None:
        raise _broken(snapshot, problem)


def _floats(held: Mapping[str, Tensor]) -> list[Tensor]:
    return [x for name, x in held.items() if x.is_floating_point() and name != LOGITS]


def _broken(snapshot: Snapshot, problem: str) -> RingkvError:
    return RingkvError(f"snapshot {snapshot.source!r}: {problem}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
