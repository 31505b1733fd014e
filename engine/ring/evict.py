"""Eviction: which layers and lanes are due, what lives there, what it is worth, and what is freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from ringkv.engine.policies import priorities
from ringkv.engine.policies.live import Live
from ringkv.engine.ring.storage import SCRATCH_BYTES, Ring, Storage
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.table import free, lowest


def evict_due(ring: Ring) -> None:
    """After a step, free ``window`` slots a head in every (layer, lane) that is full.

    A policy with state is shown its new queries before that, and whenever there are ``window`` of them.
    """
    if not ring.policy.evicts:
        return
    full = ring.counts == ring.config.capacity
    if ring.state:
        observe_due(ring, full | (ring.unobserved == ring.config.window))
    for pairs in groups(ring, full):
        evict(ring, pairs)


def evict(ring: Ring, pairs: list[tuple[int, int]]) -> None:
    """Free ``window`` slots a head in pairs that are full: slot numbers and marks only."""
    live, window = live_tokens(ring, pairs), ring.config.window
    victim = victims(ring, live, window)
    tables = ring.order, ring.position, ring.count, ring.evictions
    freed = free(victim, live.slot, window, live.pairs, *tables)
    for observer in ring.observers:
        observer.evicted(pairs, live, victim)
    ring.state.clear(live.pairs.layer, live.pairs.lane, freed)
    for pair in pairs:
        ring.counts[pair] -= window
        ring.evicted[pair] += 1


def observe_due(ring: Ring, due: np.ndarray) -> None:
    """Show the policy the queries that are new in the pairs marked in bool [L, B]."""
    for pairs in groups(ring, due):
        observe(ring, live_tokens(ring, pairs))
    ring.unobserved[due] = 0


def observe(held: Storage, live: Live) -> None:
    """Show the policy the queries that are new, and keep what it remembers of them."""
    _keep(held, live, held.config.policy.observe(live), "observe")


def _keep(held: Storage, live: Live, new: Mapping[str, Tensor], by: str) -> None:
    new = held.state.checked(live.state, new, by)
    held.state.scatter(live.pairs.layer, live.pairs.lane, live.slot, new)


def victims(held: Storage, live: Live, count: int) -> Tensor:
    """The ``count`` candidates a head that the policy lets go first, sinks and pins apart: bool [P, H, c].

    That a policy gave NaN is noted on the device, where it is read with the next tokens.
    """
    policy = held.config.policy
    if held.state and (new := policy.remember(live)):
        _keep(held, live, new, "remember")
        live = replace(live, state={**live.state, **new})
    priority = priorities(policy, live)
    held.unranked.index_add_(0, live.pairs.lane, priority.isnan().flatten(1).any(1).float())
    return lowest(priority, live.protected, count)


def evict_once(ring: Ring) -> None:
    """Launch an eviction while no lane runs, to compile it: on the device nothing is full, so nothing is freed."""
    if not ring.policy.evicts:
        return
    mirrors = ring.counts, ring.evicted, ring.unobserved
    before = [mirror.copy() for mirror in mirrors]
    ring.counts[0, 0] = ring.config.capacity
    evict_due(ring)
    for mirror, value in zip(mirrors, before, strict=True):
        mirror[:] = value
    ring.unranked.zero_()  # what a policy makes of an empty ring


def groups(ring: Ring, due: np.ndarray) -> Iterator[list[tuple[int, int]]]:
    """The pairs marked in bool [L, B], in groups that hold equally many tokens and fit the scratch."""
    if not due.any():  # nearly always, and every step comes here
        return
    # Bytes at once of a live token: order, position, range, priority and noise; or attention of the head group.
    token = max(80, 32 + 8 * ring.heads // ring.kv_heads)
    size = max(1, SCRATCH_BYTES // (ring.kv_heads * ring.config.capacity * token))
    for count in np.unique(ring.counts[due]):
        pairs = [(int(layer), int(lane)) for layer, lane in np.argwhere(due & (ring.counts == count))]
        yield from (pairs[start : start + size] for start in range(0, len(pairs), size))


def live_tokens(ring: Ring, pairs: list[tuple[int, int]]) -> Live:
    """The live tokens of pairs that hold equally many."""
    at = Pairs(pairs, ring.order.device)
    return ring.live(at, ring.order[at.layer, at.lane, :, : ring.counts[pairs[0]]].long())
