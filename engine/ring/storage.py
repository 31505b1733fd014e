"""The KV ring: fixed storage, tables of slots, and the eviction that writes only the tables.

Keys and values are written once and never moved. ``order`` says where each token lies; an eviction is a stable
partition of it, so the next tokens overwrite the victims in place. Nothing here reads the device: what the host must
know (counts, spans) it mirrors, since every change follows from what it launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ringkv.engine.config import RingConfig
from ringkv.engine.policies import priorities
from ringkv.engine.policies.live import Live
from ringkv.engine.policies.state import PolicyState
from ringkv.engine.ring.observer import RingObserver
from ringkv.kernels import native
from ringkv.kernels.advance import advance
from ringkv.kernels.append import append, record, value_range
from ringkv.kernels.attention import decode_attention
from ringkv.kernels.backend import path_of
from ringkv.kernels.layer import LayerRing, Places, places
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.rotate import Angles
from ringkv.kernels.select import free, lowest, partition
from ringkv.models.config import ModelConfig

SCRATCH_BYTES = 64 << 20


class Ring:
    """The KV storage of B lanes, and its tables.

    Attributes (L layers, B lanes, H KV heads, Hq query heads, S capacity, W window, D head dim):
        k, v: [L, B, H, S, D]; keys after norm and RoPE at their absolute position.
        position: int32 [L, B, H, S]; -1 is empty or evicted, and invisible.
        order: int32 [L, B, H, S], a permutation of the slots: the first ``count`` are live in position order, the rest
            are written next.
        v_range: float32 [L, B, H, S], max - min of the stored value vector.
        queries: [L, B, Hq, W, D], the last queries; that of position p at p mod W.
        count, evictions: int32 [L, B]. seen, seed, sample, pin, next_token: int64 [B]. active: bool [B].
        state: what the policy declared.
        counts, spans: the host's mirrors, int [L, B]: live tokens, and how many of the first slots were ever written.
        unobserved: the host's, int [L, B]: queries that a policy with state has not seen yet.
        observers: who is told of what enters and leaves, see ``RingObserver``.
    """

    def __init__(
        self, model: ModelConfig, config: RingConfig, lanes: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.policy, self.retention = config, config.policy, config.retention
        self.layers, self.lanes, self.kv_heads, self.heads = model.layers, lanes, model.kv_heads, model.heads
        slots = (model.layers, lanes, model.kv_heads, config.capacity)
        queries = (model.layers, lanes, model.heads, config.window, model.head_dim)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Zeroed, so that what an invisible slot holds is finite.
        self.k = zeros(*slots, model.head_dim, dtype=dtype)
        self.v = zeros(*slots, model.head_dim, dtype=dtype)
        self.position = zeros(*slots, dtype=torch.int32).fill_(-1)
        self.order = zeros(*slots, dtype=torch.int32)
        self.order += torch.arange(config.capacity, dtype=torch.int32, device=device)
        self.v_range = zeros(*slots, dtype=torch.float32)
        self.queries = zeros(*queries, dtype=dtype)
        self.count = zeros(model.layers, lanes, dtype=torch.int32)
        self.evictions = zeros(model.layers, lanes, dtype=torch.int32)
        self.seen, self.seed, self.sample, self.pin, self.next_token = (
            zeros(lanes, dtype=torch.int64) for _ in range(5)
        )
        self.active = zeros(lanes, dtype=torch.bool)
        self.state = PolicyState(self.policy, slots, device)
        self.scratch = torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device=device)

        self.counts, self.spans, self.evicted, self.unobserved = (
            np.zeros((model.layers, lanes), dtype=np.int64) for _ in range(4)
        )
        self.running: list[int] = []
        self.observers: list[RingObserver] = []
        names = ("k", "v", "position", "order", "v_range", "queries", "count", "evictions")
        self._views = [
            LayerRing(**{name: getattr(self, name)[layer] for name in names}, seen=self.seen, active=self.active)
            for layer in range(model.layers)
        ]
        self._places: list[Places | None] = [None] * model.layers
        self._written: tuple[Tensor, Tensor, Tensor | None]  # of the step that runs: see ``places``
        self._asked: list[Tensor] = []  # its queries, layer by layer

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is counted in ``nbytes``, by name."""
        names: tuple[str, ...] = ("k", "v", "position", "order", "v_range", "queries", "count", "evictions")
        names += ("seen", "seed", "sample", "pin", "next_token", "active")
        own = {name: getattr(self, name) for name in names}
        return own | {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, tables and policy state, all lanes; scratch apart. Never changes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def reset(self, lane: int, seed: int, sample: int = 0, pin: int = 0) -> None:
        """Empty a lane for a new request with this noise key, sample index and pinned span."""
        self.stop(lane)
        self.order[:, lane] = torch.arange(self.config.capacity, dtype=torch.int32, device=self.order.device)
        self.position[:, lane] = -1
        for table in (self.count, self.evictions):
            table[:, lane] = 0
        self.seen[lane] = self.next_token[lane] = 0
        self.seed[lane] = seed - (1 << 64) if seed >= 1 << 63 else seed
        self.sample[lane], self.pin[lane] = sample, pin
        self.state.reset(lane)
        self.counts[:, lane] = self.spans[:, lane] = self.evicted[:, lane] = self.unobserved[:, lane] = 0
        for observer in self.observers:
            observer.reset(lane)

    def start(self, lane: int, seen: int) -> None:
        """Let a prefilled lane take part in the steps."""
        self.seen[lane] = seen
        self._run(lane, True)

    def stop(self, lane: int) -> None:
        """Keep a lane out of the steps; nothing of it is written any more."""
        self._run(lane, False)

    def stop_all(self) -> None:
        """Keep every lane out of the steps."""
        for lane in self.running:
            self.stop(lane)

    def _run(self, lane: int, runs: bool) -> None:
        self.active[lane] = runs
        self.running = sorted({*self.running, lane} if runs else {*self.running} - {lane})

    def begin_step(self) -> None:
        """On the torch path, find the slots that this step writes and mark them, for all layers at once."""
        if path_of(self.k) != "torch":
            self._places = [None] * self.layers
            return
        lanes = None
        if len(self.running) < self.lanes:
            lanes = torch.tensor(self.running, dtype=torch.int64, device=self.active.device)
        rows, query_rows = places(self.order, self.count, self.seen, self.heads, self.config.window, lanes)
        seen = self.seen if lanes is None else self.seen[lanes]
        marks = seen[:, None].expand(-1, self.kv_heads).flatten().to(torch.int32)
        self.position.view(self.layers, -1).scatter_(1, rows, marks.expand(self.layers, -1))
        written = np.zeros_like(self.spans)
        written[:, self.running] = np.maximum(self.spans, self.counts + 1)[:, self.running]
        written = np.minimum(-(-written // 64) * 64, self.config.capacity)  # so that views of them last some steps
        self._places = list(map(Places, rows.unbind(), repeat(lanes), written.tolist()))
        self._written, self._asked = (rows, query_rows, lanes), []

    def attend(
        self, layer: int, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, angles: Angles
    ) -> Tensor:
        """Write one token a running lane into a layer, and attend to what is live in it.

        Args:
            qkv: [B, (Hq + 2H) * D], the fused projection; rows of lanes that do not run are ignored.
            norms: the weights [D] of the query and the key norm, or None; eps: theirs.
            angles: [B, D/2], of position ``seen``.

        Returns:
            [B, Hq * D]; zeros for a lane that does not run.
        """
        view, at = self._views[layer], self._places[layer]
        if path_of(qkv) == "native":
            return native.attend(qkv, norms, eps, angles, view)
        q = append(qkv, norms, eps, angles, view, at)
        if at is not None:
            self._asked.append(q)
        return decode_attention(q, view, at).flatten(1)

    def end_step(self) -> None:
        """Write what waits for the end of a step, and count the token that every running lane has written."""
        if self._asked:
            record(torch.stack(self._asked), self.v, self.v_range, self.queries, *self._written)
        self._asked = []
        advance(self.active, self.count, self.seen)

    def settle(self) -> None:
        """What the host does after a step: follow it in the mirrors, and evict where a layer is now full."""
        self.counts[:, self.running] += 1
        np.maximum(self.spans, self.counts, out=self.spans)
        if self.policy.evicts:
            full = self.counts == self.config.capacity
            if self.state:
                self.unobserved[:, self.running] += 1
                self._observe(full | (self.unobserved == self.config.window))
            for group in self._groups(full):
                self._evict(group)

    def _groups(self, due: np.ndarray) -> Iterator[list[tuple[int, int]]]:
        """The pairs marked in bool [L, B], in groups that hold equally many tokens and fit the scratch."""
        if not due.any():  # nearly always, and every step comes here
            return
        # Bytes at once of a live token: order, position, range, priority, noise, without Triton sorts; or attention
        # of the head group. A larger group is fewer launches.
        token = max(80 if path_of(self.k) == "triton" else 160, 32 + 8 * self.heads // self.kv_heads)
        size = max(1, SCRATCH_BYTES // (self.kv_heads * self.config.capacity * token))
        for count in np.unique(self.counts[due]):
            pairs = [(int(layer), int(lane)) for layer, lane in np.argwhere(due & (self.counts == count))]
            yield from (pairs[start : start + size] for start in range(0, len(pairs), size))

    def live(self, pairs: list[tuple[int, int]]) -> Live:
        """The live tokens of some pairs that hold equally many, for a policy."""
        where = Pairs(pairs, self.order.device)
        layer, lane = where.layer, where.lane
        n = int(self.counts[pairs[0]])
        slot = self.order[layer, lane, :, :n].long()
        return Live(
            position=self.position[layer, lane].gather(2, slot).long(),
            v_range=self.v_range[layer, lane].gather(2, slot),
            slot=slot,
            k=self.k,
            v=self.v,
            queries=self.queries,
            last=(self.seen[lane] - 1) % self.config.window,
            pairs=where,
            layer=layer,
            seed=self.seed[lane],
            sample=self.sample[lane],
            eviction=self.evictions[layer, lane].long() + 1,
            window=self.config.window,
            budget=self.config.budget_tokens,
            sinks=self.config.sinks,
            pin=self.pin[lane],
            scratch=self.scratch,
            state=self.state.gather(layer, lane, slot) if self.state else {},
        )

    def _observe(self, due: np.ndarray) -> None:
        """Show the policy the queries that are new in the pairs marked in bool [L, B]."""
        for pairs in self._groups(due):
            live = self.live(pairs)
            new = self.state.checked(live.state, self.policy.observe(live))
            self.state.scatter(live.pairs.layer, live.pairs.lane, live.slot, new)
        self.unobserved[due] = 0

    def _evict(self, pairs: list[tuple[int, int]]) -> None:
        """Free ``window`` slots a head in pairs that are full: slot numbers and marks only."""
        live = self.live(pairs)
        window = self.config.window
        victim = lowest(priorities(self.policy, live), live.protected, window)
        tables = self.order, self.position, self.count, self.evictions
        freed = free(victim, live.slot, window, live.pairs, *tables)
        for observer in self.observers:
            observer.evicted(pairs, live, victim)
        self.state.clear(live.pairs.layer, live.pairs.lane, freed)
        for pair in pairs:
            self.counts[pair] -= window
            self.evicted[pair] += 1

    def warm_up(self) -> None:
        """Compile what evictions launch, while no lane runs: on the device nothing is full, so nothing is freed."""
        if self.policy.evicts:
            mirrors = self.counts, self.evicted, self.unobserved
            before = [mirror.copy() for mirror in mirrors]
            self.counts[0, 0] = self.config.capacity
            if self.state:
                self._observe(self.counts == self.config.capacity)
            self._evict([(0, 0)])
            for mirror, value in zip(mirrors, before, strict=True):
                mirror[:] = value

    def admit(self, layer: int, lane: int, q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> None:
        """Write what is retained of a prompt's layer into a fresh lane, in position order, slots 0 .. c-1.

        Args:
            q: [n, Hq, D]; k, v: [n, H, D], all of the prompt.
            kept: bool [n], what retention keeps, or None for all. Sinks, pins and the last window tokens are added. A
                set that would fill the ring is ranked down to the budget by the policy.
        """
        n, config = len(k), self.config
        position = torch.arange(n, device=k.device)
        if kept is not None:
            protected = (position < config.sinks) | (position < self.pin[lane]) | (position >= n - config.window)
            position = position[kept | protected]
        slot = position.expand(self.kv_heads, -1)  # [H, c]
        keys, values = k.transpose(0, 1).to(self.k.dtype), v.transpose(0, 1).to(self.v.dtype)  # [H, n, D]
        v_range = value_range(values)
        state: Mapping[str, Tensor] = {}
        if self.state:
            whole = torch.arange(n, device=k.device).expand(self.kv_heads, -1)
            fresh = self.state.fresh(self.kv_heads, n)
            live = self._prompt(layer, lane, whole, q, keys, values, v_range, fresh)
            state = self.state.checked(fresh, self.policy.observe(live))
        if self.policy.evicts and slot.shape[1] >= config.capacity:
            live = self._prompt(layer, lane, slot, q[-config.window :], keys, values, v_range, state)
            victim = lowest(priorities(self.policy, live), live.protected, slot.shape[1] - config.budget_tokens)[0]
            kept_first = partition(torch.cat((victim, torch.zeros_like(victim[:, : config.window])), dim=-1))
            slot = slot.gather(1, kept_first[:, : config.budget_tokens])
        c = slot.shape[1]
        rows = slot[..., None].expand(-1, -1, keys.shape[-1])
        self.k[layer, lane, :, :c] = keys.gather(1, rows)
        self.v[layer, lane, :, :c] = values.gather(1, rows)
        self.v_range[layer, lane, :, :c] = v_range.gather(1, slot)
        self.position[layer, lane, :, :c] = slot.int()
        recent = torch.arange(max(0, n - config.window), n, device=k.device)
        self.queries[layer, lane, :, recent % config.window] = q[recent].transpose(0, 1).to(self.queries.dtype)
        if self.state:
            where = torch.tensor([layer], device=k.device), torch.tensor([lane], device=k.device)
            stored = {name: x.gather(2, slot[None]) if name in self.state.slots else x for name, x in state.items()}
            self.state.scatter(*where, torch.arange(c, device=k.device).expand(1, self.kv_heads, -1), stored)
        for observer in self.observers:
            observer.admitted(layer, lane, position, slot, v_range)
        self.count[layer, lane] = c
        self.counts[layer, lane] = self.spans[layer, lane] = c

    def _prompt(
        self,
        layer: int,
        lane: int,
        slot: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        v_range: Tensor,
        state: Mapping[str, Tensor],
    ) -> Live:
        """A prompt's tokens at positions ``slot`` [H, c] and its last queries [w, Hq, D], for a policy.

        keys, values: [H, n, D]. v_range: float32 [H, n]. state: of the whole prompt, [1, H, n] a value a token.
        """
        config = self.config
        per_token = {name: state[name].gather(2, slot[None]) for name in state if name in self.state.slots}
        return Live(
            position=slot[None],
            v_range=v_range.gather(1, slot)[None],
            slot=slot[None],
            k=keys[None, None],
            v=values[None, None],
            queries=q.transpose(0, 1)[None, None],
            last=torch.full_like(self.pin[lane, None], len(q) - 1),
            pairs=Pairs([(0, 0)], slot.device),
            layer=torch.tensor([layer], device=slot.device),
            seed=self.seed[lane, None],
            sample=torch.zeros_like(self.sample[lane, None]),
            eviction=torch.zeros_like(self.seed[lane, None]),
            window=config.window,
            budget=config.budget_tokens,
            sinks=config.sinks,
            pin=self.pin[lane, None],
            scratch=self.scratch,
            state={**state, **per_token},
        )

    def copy_lane(self, source: int, target: int, sample: int) -> None:
        """Make a lane that does not run a running copy of another, with its own sample index."""
        for name, tensor in self.tensors().items():
            if name != "active":
                own = tensor if tensor.dim() == 1 else tensor.transpose(0, 1)  # the lane first
                own[target] = own[source]
        self.sample[target] = sample
        for observer in self.observers:
            observer.copied(source, target)
        for mirror in (self.counts, self.spans, self.evicted, self.unobserved):
            mirror[:, target] = mirror[:, source]
        self._run(target, True)
