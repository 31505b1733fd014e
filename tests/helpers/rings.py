"""Rings filled by hand, without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringkv.engine.config import RingConfig
from ringkv.engine.policies import Policy
from ringkv.engine.ring.storage import Ring
from ringkv.kernels.append import value_range
from tiny import tiny_config


def make_ring(
    policy: str | Policy,
    *,
    budget: int,
    window: int,
    sinks: int = 4,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 4,
    layers: int = 1,
    lanes: int = 1,
    **model_changes: Any,
) -> Ring:
    model = tiny_config(heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=layers, **model_changes)
    config = RingConfig(budget, window, policy, "all", sinks)
    return Ring(model, config, lanes, torch.device("cpu"), torch.float32)


def fill(
    ring: Ring,
    layer: int,
    lane: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scramble: int | None = None,
    position: Tensor | None = None,
) -> None:
    """Put n tokens into one (layer, lane), each head in its own order of slots.

    Args:
        q: [Hq, W, D], the last W queries, oldest first. k, v: [H, n, D], in position order.
        scramble: seed of the orders; None leaves slot = rank.
        position: [H, n], the same last one in all heads; None is 0 .. n-1.
    """
    heads, n = k.shape[:2]
    window = ring.config.window
    position = torch.arange(n).expand(heads, -1) if position is None else position
    seen = int(position[0, -1]) + 1
    generator = torch.Generator().manual_seed(scramble or 0)
    for head in range(heads):
        order = torch.arange(ring.config.capacity)
        if scramble is not None:
            order = torch.randperm(ring.config.capacity, generator=generator)
        slot = order[:n]
        ring.order[layer, lane, head] = order.int()
        ring.k[layer, lane, head, slot] = k[head].to(ring.k.dtype)
        ring.v[layer, lane, head, slot] = v[head].to(ring.v.dtype)
        ring.v_range[layer, lane, head, slot] = value_range(v[head])
        ring.position[layer, lane, head] = -1
        ring.position[layer, lane, head, slot] = position[head].int()
    ring.queries[layer, lane, :, torch.arange(seen - window, seen) % window] = q.to(ring.queries.dtype)
    ring.count[layer, lane] = n
    ring.counts[layer, lane] = n
    ring.spans[layer, lane] = ring.config.capacity
    ring.seen[lane] = seen


def positions(ring: Ring, layer: int, lane: int) -> list[list[int]]:
    """Live positions of each head, ascending."""
    return [sorted(p for p in head if p >= 0) for head in ring.position[layer, lane].tolist()]
