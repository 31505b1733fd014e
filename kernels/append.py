"""Norm and rotate the heads of one token a lane, and write them into a layer of the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.kernels.layer import LayerRing
from ringkv.kernels.rotate import Angles, split_rotate


def append(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles, ring: LayerRing) -> Tensor:
    """Write a step's keys, values, value ranges, position marks and queries into a layer, in place.

    Args:
        qkv: [B, (Hq + 2H) * D], the fused projection, in the ring's dtype.
        norms: the weights [D] of the query and the key norm, or None.
        eps: of these norms.
        angles: of position ``ring.seen``, [B, D/2].
        ring: the layer. Nothing of a lane that is not active is written.

    Returns:
        The queries [B, Hq, D] after norm and RoPE; undefined for a lane that is not active.
    """
    lanes, kv_heads, slots = ring.order.shape
    heads, window = ring.queries.shape[1:3]
    q, k, v = split_rotate(qkv, norms, eps, angles, heads, kv_heads)
    lane = torch.arange(lanes, device=qkv.device)[:, None]
    head, query_head = (torch.arange(n, device=qkv.device) for n in (kv_heads, heads))
    slot = ring.order[lane, head, ring.count.clamp(max=slots - 1)[:, None]].long()  # [B, H]

    def write(table: Tensor, at: tuple[Tensor, Tensor, Tensor], value: Tensor) -> None:
        runs = ring.active.view(-1, *(1,) * (value.dim() - 1))
        table[at] = torch.where(runs, value.to(table.dtype), table[at])

    write(ring.k, (lane, head, slot), k)
    write(ring.v, (lane, head, slot), v)
    write(ring.v_range, (lane, head, slot), value_range(v.to(ring.v.dtype)))
    write(ring.position, (lane, head, slot), ring.seen[:, None].expand(-1, kv_heads))
    write(ring.queries, (lane, query_head, (ring.seen % window)[:, None]), q)
    return q


def value_range(v: Tensor) -> Tensor:
    """max - min of each value vector: [..., D] -> float32 [...]."""
    wide = v.to(torch.float32)
    return wide.amax(-1) - wide.amin(-1)
