"""What a policy sees of the ring: the live tokens of some (layer, lane) pairs, in position order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringkv.kernels.blocks import blocks
from ringkv.kernels.pairs import Pairs
from ringkv.kernels.philox import EVICTION, PROJECTION, normal, to_uniform
from ringkv.kernels.table import (
    key_scores,
    lengths,
    leverage,
    philox,
    received_attention,
    redundancy,
    window_attention,
)


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
        inv_freq: float32 [P, D/2], the frequencies of RoPE, which turns the components f and f + D/2 of a vector at
            position p by p * inv_freq[f]; 0 in layers without RoPE. Those of ``dynamic`` RoPE are of short texts.
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
    inv_freq: Tensor
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

    @property
    def query_position(self) -> Tensor:
        """int64 [P, w]: positions of ``queries``, negative where none was written yet."""
        w = self.queries.shape[3]
        age = (self.last[:, None] - torch.arange(w, device=self.last.device)) % w
        return self.seen[:, None] - 1 - age

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

    def received_attention(self, since: Tensor, group_max: bool = False) -> Tensor:
        """Attention that each live token gets from the queries at positions >= ``since`` [P], summed.

        Each query's softmax is over the live tokens up to its own position. Of the query heads of a KV head the mean is
        taken, or with ``group_max`` the largest for each query.

        Returns:
            float32 [P, H, n].
        """
        seen_by = self.position, self.query_position, since
        return received_attention(self.queries, self.k, self.slot, self.pairs, self.scratch, *seen_by, group_max)

    def unrotated(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The queries [start:stop] before RoPE, but for its factor: complex64 [P, Hq, w, D/2], a number a pair."""
        queries = paired(self.queries[self.pairs.layer, self.pairs.lane, :, start:stop].to(torch.float32))
        # As RoPE forms them: a position as float32, times a frequency.
        angle = self.query_position[:, None, start:stop, None].to(torch.float32) * self.inv_freq[:, None, None]
        return queries.mul_(torch.complex(angle.cos(), -angle.sin()))

    def turned(self, rotation: Tensor) -> Tensor:
        """All queries as ``rotation``, a factor a pair [P, D/2], turns them from before RoPE: float32 [P, Hq, w, D]."""
        out = torch.empty(len(self.pairs), *self.queries.shape[2:], dtype=torch.float32, device=self.last.device)
        for start in blocks(out.shape[2], block := self._queries_at_once, out):
            queries = self.unrotated(start, start + block)
            out[:, :, start : start + block] = unpaired(queries.mul_(rotation[:, None, None]))
        return out

    def unrotated_sums(self, since: Tensor) -> tuple[Tensor, Tensor]:
        """Of the queries at positions >= ``since`` [P], before RoPE, the sum and the sum of each pair's modulus.

        Returns:
            float32 [P, Hq, D] and [P, Hq, D/2].
        """
        p, (heads, w, d) = len(self.pairs), self.queries.shape[2:]
        total = torch.zeros(p, heads, d, dtype=torch.float32, device=self.last.device)
        moduli = torch.zeros(p, heads, d // 2, dtype=torch.float32, device=self.last.device)
        for start in blocks(w, block := self._queries_at_once, total):
            old = self.query_position[:, None, start : start + block, None] < since[:, None, None, None]
            queries = self.unrotated(start, start + block).masked_fill(old, 0.0)
            total += unpaired(queries.sum(2))
            moduli += queries.abs().sum(2)
        return total, moduli

    def rotation(self, ahead: Tensor) -> Tensor:
        """The mean rotation over the positions ``seen + ahead`` [F]: complex64 [P, D/2], a factor a pair."""
        angle = (self.seen[:, None, None] + ahead[:, None]).to(torch.float32) * self.inv_freq[:, None]  # [P, F, D/2]
        return torch.complex(angle.cos().mean(1), angle.sin().mean(1))

    def key_scores(self, linear: Tensor, squared: Tensor | None = None, moduli: Tensor | None = None) -> Tensor:
        """Of each live key k: k . linear, plus the sum of (k . row)^2, plus the lengths of k's pairs . moduli.

        Args:
            linear: float32 [P, Hq, D]. squared: float32 [P, Hq, T, D], rows. moduli: float32 [P, Hq, D/2].

        Returns:
            float32 [P, Hq, n].
        """
        return key_scores(self.k, self.slot, self.pairs, self.scratch, linear, squared, moduli)

    def value_lengths(self) -> Tensor:
        """The Euclidean length of each candidate's value vector: float32 [P, H, c]."""
        return lengths(self.v, self.slot[..., : self.candidates], self.pairs, self.scratch)

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

    @property
    def _queries_at_once(self) -> int:
        """How many queries of all pairs, with what is computed from them, take a fraction of what the scratch does."""
        heads, _, d = self.queries.shape[2:]
        return max(1, self.scratch.numel() // (16 * len(self.pairs) * heads * d))

    def _gather(self, storage: Tensor, pair: int, head: int) -> Tensor:
        layer, lane = self.pairs[pair]
        return storage[layer, lane, head].index_select(0, self.slot[pair, head])


def paired(x: Tensor) -> Tensor:
    """The pairs that RoPE turns, components f and f + D/2, as complex numbers: [..., D] -> complex [..., D/2]."""
    return torch.complex(*x.chunk(2, -1))


def unpaired(z: Tensor) -> Tensor:
    """The vector of such pairs: complex [..., D/2] -> [..., D]."""
    return torch.cat((z.real, z.imag), -1)
