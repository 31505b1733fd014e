"""What a policy sees of the ring: the live tokens of some (layer, lane) pairs, in position order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringkv.kernels.pairs import Pairs
from ringkv.kernels.philox import EVICTION, PROJECTION, normal, to_uniform
from ringkv.kernels.table import leverage, philox, received_attention, redundancy, window_attention


@dataclass(frozen=True)
class Live:
    """P pairs, each with n live tokens a KV head, the last ``window`` of which are never evicted.

    The candidates are the first c = n - window. All tensors are read-only for a policy, except its own state.

    Attributes:
        position: int64 [P, H, n], ascending.
        v_range: float32 [P, H, n], max - min of each stored value vector.
        slot: int64 [P, H, n], where each token lies in ``k`` and ``v``.
        k, v: [L, B, H, S, D], the storage; slots are in no order. See ``keys`` and ``values``.
        queries: [L, B, Hq, w, D], the last w <= window queries, in no order.
        last: int64 [P], which of them is the last.
        pairs: the P (layer, lane) indices into the storage, as ints and as tensors.
        layer: int64 [P], the model's layer (a prompt's storage holds one layer at index 0).
        seed, sample: int64 [P], the request's noise key and sample index.
        eviction: int64 [P], which eviction this is; 0 at prefill.
        budget: tokens kept a KV head after the eviction.
        sinks: the tokens at positions below it are protected.
        pin: int64 [P], the same for pins.
        scratch: float32 [*], working memory that bounds what is materialised at once.
        state: what the policy declared, for these pairs: [P, H, n] a value a slot, [P, ...] a (layer, lane)'s.
    """

    position: Tensor
    v_range: Tensor
    slot: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor
    last: Tensor
    pairs: Pairs
    layer: Tensor
    seed: Tensor
    sample: Tensor
    eviction: Tensor
    window: int
    budget: int
    sinks: int
    pin: Tensor
    scratch: Tensor
    state: Mapping[str, Tensor]

    @property
    def candidates(self) -> int:
        """c: how many of the n live tokens may be evicted, protected ones included."""
        return self.slot.shape[-1] - self.window

    @property
    def protected(self) -> Tensor:
        """bool [P, H, c]: sinks and pins."""
        return self.sink | self.pinned

    @property
    def sink(self) -> Tensor:
        """bool [P, H, c]."""
        return self.position[..., : self.candidates] < self.sinks

    @property
    def pinned(self) -> Tensor:
        """bool [P, H, c]: pinned tokens that are not sinks."""
        position = self.position[..., : self.candidates]
        return (position < self.pin[:, None, None]) & (position >= self.sinks)

    @property
    def seen(self) -> Tensor:
        """int64 [P]: tokens seen, so the last one's position + 1."""
        return self.position[:, 0, -1] + 1

    def keys(self, pair: int, head: int) -> Tensor:
        """[n, D]: the live keys of one KV head, in position order."""
        return self._gather(self.k, pair, head)

    def values(self, pair: int, head: int) -> Tensor:
        """[n, D]: the live values of one KV head, in position order."""
        return self._gather(self.v, pair, head)

    def attention(self, last_only: bool = False, group_max: bool = False) -> Tensor:
        """Mean over the window's queries of a = softmax over the candidates of q.k / sqrt(D).

        Args:
            last_only: the last query alone.
            group_max: the largest q.k over a KV head's query heads, before the softmax.

        Returns:
            float32 [P, Hq, c], or [P, H, c] with ``group_max``.
        """
        only = self.last if last_only else None
        slot = self.slot[..., : self.candidates]
        return window_attention(self.queries, self.k, slot, self.pairs, self.scratch, only, group_max)

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """Mean over the query heads of each KV head: [P, Hq, c] -> [P, H, c]."""
        return per_query_head.unflatten(1, (self.slot.shape[1], -1)).mean(2)

    def received_attention(self, since: Tensor) -> Tensor:
        """Attention that each live token gets from the queries at positions >= ``since`` [P], summed.

        Each query's softmax is over the live tokens up to its own position; the mean over the head group is taken.

        Returns:
            float32 [P, H, n].
        """
        w = self.queries.shape[3]
        age = (self.last[:, None] - torch.arange(w, device=self.last.device)) % w
        query_position = self.seen[:, None] - 1 - age  # [P, w], negative where no query was written yet
        return received_attention(
            self.queries, self.k, self.slot, self.pairs, self.scratch, self.position, query_position, since
        )

    def redundancy(self, threshold: float) -> Tensor:
        """How much the other live keys resemble each one, as R-KV counts it: float32 [P, H, n]."""
        return redundancy(self.k, self.slot, self.pairs, self.scratch, threshold)

    def leverage(self, projection: Tensor) -> Tensor:
        """|kG|^2 * |vG|^2 of each candidate for G [P, D, r]: float32 [P, H, c]."""
        slot = self.slot[..., : self.candidates]
        return leverage(self.k, self.v, slot, self.pairs, self.scratch, projection)

    def projection(self, rank: int, eviction: Tensor) -> Tensor:
        """A random projection, float32 [P, D, rank], entries of variance 1 / rank; one for all heads of a pair.

        Args:
            eviction: int64 [P], which draw of the request it is.
        """
        d = self.k.shape[-1]
        index = torch.arange(d * rank, device=self.slot.device).view(d, rank)
        seed, layer, draw, sample = (x[:, None, None] for x in (self.seed, self.layer, eviction, self.sample))
        words = philox(seed, index, layer * 65536, draw, PROJECTION + 256 * sample)
        return normal(words[0], words[1]) * rank**-0.5

    def uniform(self) -> Tensor:
        """float32 [P, H, c] in (0, 1): the noise of this eviction, one number a candidate, the same in any lane."""
        heads = torch.arange(self.slot.shape[1], device=self.slot.device)
        head = self.layer[:, None, None] * 65536 + heads[None, :, None]
        seed, eviction, sample = (x[:, None, None] for x in (self.seed, self.eviction, self.sample))
        position = self.position[..., : self.candidates]
        return to_uniform(philox(seed, position, head, eviction, EVICTION + 256 * sample)[0])

    def _gather(self, storage: Tensor, pair: int, head: int) -> Tensor:
        layer, lane = self.pairs[pair]
        return storage[layer, lane, head].index_select(0, self.slot[pair, head])
