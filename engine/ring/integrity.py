"""What must hold of a ring after every step, whatever was written and evicted; and of a lane that a file holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ringkv.engine.config import RingConfig
from ringkv.engine.ring.storage import Ring


def check_integrity(ring: Ring) -> None:
    """Assert what must hold after every step, reading the device.

    Raises:
        AssertionError: naming the invariant, the layer and the lane.
    """
    for lane in range(ring.lanes):
        problem = broken(ring.config, ring.lane(lane))
        assert problem is None, f"lane {lane}: {problem}"


def broken(config: RingConfig, held: Mapping[str, Tensor]) -> str | None:
    """What does not hold of a lane, as ``Ring.lane`` gives it; None if all does."""
    return next(_problems(config, {name: x.cpu() for name, x in held.items() if not x.is_floating_point()}), None)


def _problems(config: RingConfig, held: Mapping[str, Tensor]) -> Iterator[str]:
    order, seen = held["order"], int(held["seen"])
    counts, spans, evicted, unobserved = (held[f"host.{name}"] for name in ("counts", "spans", "evicted", "unobserved"))
    slots = torch.arange(config.capacity, dtype=torch.int32)
    if not torch.equal(order.sort(-1).values, slots.expand_as(order)):
        yield "order is not a permutation of the slots"
    if not torch.equal(held["count"].long(), counts):
        yield "the host's counts differ from the device's"
    if not torch.equal(held["evictions"].long(), evicted):
        yield "the host's evictions differ from the device's"
    # A layer that is full has evicted before the next step, unless nothing is ever evicted.
    if bool(((counts < 0) | (counts > config.capacity - config.policy.evicts)).any()):
        yield f"count is not from 0 to {config.capacity - config.policy.evicts}"
    if bool(((spans < counts) | (spans > config.capacity) | (evicted < 0)).any()):
        yield "spans or evictions cannot be"
    if bool(((unobserved < 0) | (unobserved >= config.window)).any()):
        yield f"unobserved is not from 0 to {config.window - 1}"
    if seen < 0:
        yield "seen is negative"
    position = held["position"].gather(2, order.long())
    for layer, count in enumerate(counts.tolist()):
        where = f"layer {layer}"
        live, free = position[layer, :, :count], position[layer, :, count:]
        if not (free == -1).all():
            yield f"{where}: a free slot is marked live"
        if not (live >= 0).all():
            yield f"{where}: a live slot is marked free"
        if not (live.diff(dim=-1) > 0).all():
            yield f"{where}: live positions do not ascend"
        if not count or not seen:  # it was left before its prompt was read
            continue
        if not (live < seen).all():
            yield f"{where}: a live position lies in the future"
        head = min(max(config.sinks, int(held["pin"])), seen)
        if head > count or not (live[:, :head] == slots[:head]).all():
            yield f"{where}: a sink or pinned token is gone"
        recent = min(config.window, seen)
        if recent > count or not (live[:, count - recent :] == torch.arange(seen - recent, seen)).all():
            yield f"{where}: a window token is gone"
