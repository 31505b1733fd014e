"""Admission: how a layer of a prompt enters a fresh lane."""

from __future__ import annotations

import torch
from torch import Tensor

from ringkv.engine.policies.state import PolicyState
from ringkv.engine.ring.evict import observe, victims
from ringkv.engine.ring.storage import Ring, Storage
from ringkv.kernels.append import value_range
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.select import partition


def admit(ring: Ring, layer: int, lane: int, q: Tensor, k: Tensor, v: Tensor, let_in: Tensor | None) -> None:
    """Write what is retained of a prompt's layer into a fresh lane, in position order, slots 0 .. c-1.

    Args:
        q: [n, Hq, D]; k, v: [n, H, D], all of the prompt.
        let_in: bool [n], what retention lets in, or None for all. Sinks, pins and the last window tokens are added. A
            set that would fill the ring is ranked down to the budget by the policy.
    """
    n, config, device = len(k), ring.config, k.device
    position = torch.arange(n, device=device)
    window = position[max(0, n - config.window) :]
    prompt = _prompt(ring, layer, lane, q, k, v)
    if ring.state:
        observe(prompt, prompt.live(Pairs([(0, 0)], device), position.expand(1, ring.kv_heads, -1)))
    if let_in is not None:
        protected = (position < config.sinks) | (position < ring.pin[lane]) | (position >= n - config.window)
        position = position[let_in | protected]

    ring.queries[layer, lane, :, window % config.window] = q[window].transpose(0, 1).to(ring.queries.dtype)
    slot = position.expand(1, ring.kv_heads, -1)  # of the prompt, [1, H, c]
    if ring.policy.evicts and len(position) >= config.capacity:
        prompt.queries = ring.queries[layer, lane][None, None]
        victim = victims(prompt, prompt.live(Pairs([(0, 0)], device), slot), len(position) - config.budget_tokens)
        of_window = torch.zeros_like(victim[..., : config.window])
        slot = slot.gather(2, partition(torch.cat((victim, of_window), dim=-1))[..., : config.budget_tokens])

    c = slot.shape[2]
    rows = slot[0, :, :, None].expand(-1, -1, k.shape[-1])
    ring.k[layer, lane, :, :c] = prompt.k[0, 0].gather(1, rows)
    ring.v[layer, lane, :, :c] = prompt.v[0, 0].gather(1, rows)
    ring.v_range[layer, lane, :, :c] = prompt.v_range[0, 0].gather(1, slot[0])
    ring.position[layer, lane, :, :c] = slot[0].int()
    if ring.state:
        at, origin = Pairs([(layer, lane)], device), Pairs([(0, 0)], device)
        entered = torch.arange(c, device=device).expand(1, ring.kv_heads, -1)
        ring.state.scatter(at.layer, at.lane, entered, prompt.state.gather(origin.layer, origin.lane, slot))
    for observer in ring.observers:
        observer.admitted(layer, lane, position, slot[0], prompt.v_range[0, 0])
    ring.count[layer, lane] = c
    ring.counts[layer, lane] = ring.spans[layer, lane] = c


def _prompt(ring: Ring, layer: int, lane: int, q: Tensor, k: Tensor, v: Tensor) -> Storage:
    """A layer of a prompt as storage of its own: its token at position p lies in slot p of one layer and one lane."""
    n, kv_heads = k.shape[:2]
    keys, values = k.transpose(0, 1).to(ring.k.dtype), v.transpose(0, 1).to(ring.v.dtype)  # [H, n, D]
    alone = slice(lane, lane + 1)
    start = {name: value[layer : layer + 1] for name, value in ring.state.start.items()}
    return Storage(
        config=ring.config,
        scratch=ring.scratch,
        k=keys[None, None],
        v=values[None, None],
        position=torch.arange(n, dtype=torch.int32, device=k.device).expand(1, 1, kv_heads, -1),
        v_range=value_range(values)[None, None],
        queries=q.transpose(0, 1)[None, None],
        evictions=torch.full_like(ring.evictions[:1, alone], -1),
        seen=torch.full_like(ring.seen[alone], n),
        seed=ring.seed[alone],
        sample=torch.zeros_like(ring.sample[alone]),  # samples share one prefill
        pin=ring.pin[alone],
        inv_freq=ring.inv_freq[layer : layer + 1],
        unranked=ring.unranked[alone],
        state=PolicyState(ring.policy, start, (1, 1, kv_heads, n), k.device),
        first_layer=layer,
    )
