"""The KV ring: fixed storage, tables of slots, and the lanes that share it.

Keys and values are written once and never moved. ``order`` says where each token lies; an eviction is a stable
partition of it, so the next tokens overwrite the victims in place. Nothing here reads the device: the host mirrors what
it must know (counts, spans), since every change follows from what it launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringkv.engine.config import RingConfig
from ringkv.engine.policies.live import Live
from ringkv.engine.policies.state import PolicyState
from ringkv.engine.ring.observer import RingObserver
from ringkv.kernels.layer import LayerRing
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.table import advance
from ringkv.models.config import ModelConfig
from ringkv.models.rope import layer_frequencies

SCRATCH_BYTES = 64 << 20


@dataclass(eq=False)
class Storage:
    """What an eviction reads, of L layers and B lanes: a whole ring, or one layer of a prompt on its way into it.

    Attributes (H KV heads, Hq query heads, S slots, W window, D head dim):
        config: sizes and policy.
        scratch: float32 [*], working memory that bounds what is materialised at once.
        k, v: [L, B, H, S, D]; keys after norm and RoPE at their absolute position.
        position: int32 [L, B, H, S]; -1 is empty or evicted, and invisible.
        v_range: float32 [L, B, H, S], max - min of the stored value vector.
        queries: [L, B, Hq, w, D], the last w <= W queries; that of position p at p mod w.
        evictions: int32 [L, B], how many there were; -1 before a prompt has entered.
        seen, seed, sample, pin: int64 [B].
        inv_freq: float32 [L, D/2]; see ``Live``.
        unranked: float32 [B], above 0 where the policy gave NaN.
        state: what the policy declared.
        first_layer: the model's number of layer 0.
    """

    config: RingConfig
    scratch: Tensor
    k: Tensor
    v: Tensor
    position: Tensor
    v_range: Tensor
    queries: Tensor
    evictions: Tensor
    seen: Tensor
    seed: Tensor
    sample: Tensor
    pin: Tensor
    inv_freq: Tensor
    unranked: Tensor
    state: PolicyState
    first_layer: int = 0

    def live(self, pairs: Pairs, slot: Tensor) -> Live:
        """The tokens of P (layer, lane) pairs that lie in the slots [P, H, n], in position order, for a policy."""
        layer, lane = pairs.layer, pairs.lane
        return Live(
            position=self.position[layer, lane].gather(2, slot).long(),
            v_range=self.v_range[layer, lane].gather(2, slot),
            slot=slot,
            k=self.k,
            v=self.v,
            queries=self.queries,
            last=(self.seen[lane] - 1) % self.queries.shape[3],
            pairs=pairs,
            layer=layer + self.first_layer,
            inv_freq=self.inv_freq[layer],
            seed=self.seed[lane],
            sample=self.sample[lane],
            eviction=self.evictions[layer, lane].long() + 1,
            window=self.config.window,
            budget=self.config.budget_tokens,
            sinks=self.config.sinks,
            pin=self.pin[lane],
            scratch=self.scratch,
            state=self.state.gather(layer, lane, slot),
        )


class Ring(Storage):
    """The KV storage of B lanes, and its tables.

    Args:
        start: what the policy's state starts with; None asks the policy, which may read a file.

    Attributes, beside those of ``Storage``:
        order: int32 [L, B, H, S], a permutation of the slots: the first ``count`` are live in position order, the rest
            are written next.
        count: int32 [L, B]. next_token: int64 [B]. active: bool [B].
        views: each layer as the operations of a step see it.
        counts, spans, evicted: the host's mirrors, int [L, B]: live tokens, how many of the first slots were ever
            written, and evictions.
        unobserved: the host's, int [L, B]: queries that a policy with state has not seen yet.
        running: the lanes that take part in the steps.
        observers: who is told of what enters and leaves; see ``RingObserver``.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: RingConfig,
        lanes: int,
        device: torch.device,
        dtype: torch.dtype,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.policy, self.retention = config.policy, config.retention
        self.layers, self.lanes, self.kv_heads, self.heads = model.layers, lanes, model.kv_heads, model.heads
        slots = (model.layers, lanes, model.kv_heads, config.capacity)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Zeroed, so that what an invisible slot holds is finite.
        super().__init__(
            config=config,
            scratch=torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device=device),
            k=zeros(*slots, model.head_dim, dtype=dtype),
            v=zeros(*slots, model.head_dim, dtype=dtype),
            position=zeros(*slots, dtype=torch.int32).fill_(-1),
            v_range=zeros(*slots, dtype=torch.float32),
            queries=zeros(model.layers, lanes, model.heads, config.window, model.head_dim, dtype=dtype),
            evictions=zeros(model.layers, lanes, dtype=torch.int32),
            seen=zeros(lanes, dtype=torch.int64),
            seed=zeros(lanes, dtype=torch.int64),
            sample=zeros(lanes, dtype=torch.int64),
            pin=zeros(lanes, dtype=torch.int64),
            inv_freq=layer_frequencies(model).to(device),
            unranked=zeros(lanes, dtype=torch.float32),
            state=PolicyState(self.policy, self.policy.start(model) if start is None else start, slots, device),
        )
        self.order = zeros(*slots, dtype=torch.int32)
        self.order += torch.arange(config.capacity, dtype=torch.int32, device=device)
        self.count = zeros(model.layers, lanes, dtype=torch.int32)
        self.next_token = zeros(lanes, dtype=torch.int64)
        self.active = zeros(lanes, dtype=torch.bool)

        self.counts, self.spans, self.evicted, self.unobserved = (
            np.zeros((model.layers, lanes), dtype=np.int64) for _ in range(4)
        )
        self.running: list[int] = []
        self.observers: list[RingObserver] = []
        names = ("k", "v", "position", "order", "v_range", "queries", "count", "evictions")
        self.views = [
            LayerRing(**{name: getattr(self, name)[layer] for name in names}, seen=self.seen, active=self.active)
            for layer in range(model.layers)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is counted in ``nbytes``, by name."""
        names: tuple[str, ...] = ("k", "v", "position", "order", "v_range", "queries", "count", "evictions")
        names += ("seen", "seed", "sample", "pin", "unranked", "next_token", "active")
        own = {name: getattr(self, name) for name in names}
        return own | {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, tables and policy state, all lanes; scratch and frequencies apart. Never changes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def reset(self, lane: int, seed: int, sample: int = 0, pin: int = 0) -> None:
        """Empty a lane for a new request with this noise key, sample index and pinned span."""
        self.stop(lane)
        self.order[:, lane] = torch.arange(self.config.capacity, dtype=torch.int32, device=self.order.device)
        self.position[:, lane] = -1
        for table in (self.count, self.evictions):
            table[:, lane] = 0
        self.seen[lane] = self.next_token[lane] = 0
        self._key(lane, seed, sample)
        self.pin[lane], self.unranked[lane] = pin, 0
        self.state.reset(lane)
        for mirror in self.mirrors.values():
            mirror[:, lane] = 0
        for observer in self.observers:
            observer.reset(lane)

    def start(self, lane: int, seen: int) -> None:
        """Let a prefilled lane take part in the steps."""
        self.seen[lane] = seen
        self.run(lane, True)

    def stop(self, lane: int) -> None:
        """Keep a lane out of the steps; nothing of it is written any more."""
        self.run(lane, False)

    def stop_all(self) -> None:
        """Keep every lane out of the steps, whatever the mirrors say: an interrupt may have come between two lines."""
        self.active.zero_()
        self.running = []

    def run(self, lane: int, runs: bool) -> None:
        """Say whether a lane takes part in the steps."""
        self.active[lane] = runs
        self.running = sorted({*self.running, lane} if runs else {*self.running} - {lane})

    def advance(self) -> None:
        """On the device, count the token that every running lane has written in a step."""
        advance(self.active, self.count, self.seen)

    def follow(self) -> None:
        """On the host, follow a step that was launched in the mirrors."""
        self.counts[:, self.running] += 1
        np.maximum(self.spans, self.counts, out=self.spans)
        if self.state:
            self.unobserved[:, self.running] += 1

    @property
    def mirrors(self) -> dict[str, np.ndarray]:
        """What the host knows of every lane, [L, B] each, by name."""
        return {name: getattr(self, name) for name in ("counts", "spans", "evicted", "unobserved")}

    def lane(self, lane: int) -> dict[str, Tensor]:
        """Views of all that one lane holds, [L, ...] or [], by name: its part of each table and, on the host, of each
        mirror; all but whether it runs."""
        views = {name: x[lane] if x.dim() == 1 else x[:, lane] for name, x in self.tensors().items()}
        del views["active"]
        return views | {f"host.{name}": torch.from_numpy(x[:, lane]) for name, x in self.mirrors.items()}

    def put(self, lane: int, held: Mapping[str, Tensor], seed: int, sample: int) -> None:
        """Make a lane that does not run a running copy of what ``lane`` gave, of whatever lane, ring and device.

        Args:
            held: in the sizes of this ring, which is not checked here.
            seed, sample: as of ``reset``, for the noise from now on.
        """
        self._copy(lane, held)
        self._key(lane, seed, sample)
        for observer in self.observers:
            observer.reset(lane)

    def copy_lane(self, source: int, target: int, sample: int) -> None:
        """Make a lane that does not run a running copy of another, with its own sample index."""
        self._copy(target, self.lane(source))
        self.sample[target] = sample
        for observer in self.observers:
            observer.copied(source, target)

    def _copy(self, lane: int, held: Mapping[str, Tensor]) -> None:
        self.stop(lane)
        for name, own in self.lane(lane).items():
            own.copy_(held[name])
        self.run(lane, True)

    def _key(self, lane: int, seed: int, sample: int) -> None:
        self.seed[lane] = seed - (1 << 64) if seed >= 1 << 63 else seed
        self.sample[lane] = sample
