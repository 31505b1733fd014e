"""The oracle: a decoder that keeps explicit Python lists of tokens and shares no code with the engine.

No ring, no slots, no fused products: every list holds (position, key, value, value range) of one layer and KV head, and
attention is written out over what a list holds. Slow, and simple enough to be believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    x, k = list(counter), [key & MASK, key >> 32 & MASK]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & MASK, a >> 32 ^ x[3] ^ k[1], a & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return x


def uniform(key: int, counter: tuple[int, int, int, int]) -> float:
    return ((philox(key, counter)[0] >> 9) + 0.5) / 2**23


@dataclass
class Token:
    position: int
    k: Tensor  # [D]
    v: Tensor  # [D]
    mass: float = 0.0  # attention got from every query so far, mean over the head group
    memory: float = 0.0  # G-KV's

    @property
    def v_range(self) -> float:
        return float(self.v.float().max() - self.v.float().min())


# An eviction and the policy's fields -> one priority a candidate
Priority = Callable[..., list[float]]


@dataclass
class Eviction:
    """One KV head that must lose ``victims`` tokens."""

    heads: list[list[Token]]  # of every KV head of the layer, before any of them lost a token
    head: int
    past: Tensor  # [Hq, n, D]: every query of the layer; that of position p at p
    inv_freq: Tensor  # [D/2]
    budget: int
    window: int
    sinks: int
    pin: int
    seed: int
    layer: int
    number: int  # of this eviction, 0 at prefill

    @property
    def tokens(self) -> list[Token]:
        return self.heads[self.head]

    @property
    def queries(self) -> Tensor:
        """[Hq, W, D]: of the window, oldest first."""
        return self.past[:, -self.window :]

    @property
    def seen(self) -> int:
        return self.past.shape[1]

    def angle(self, positions: Sequence[int]) -> Tensor:
        """[n, D/2], rounded as RoPE rounds it; float64 from here on."""
        return (torch.tensor(positions, dtype=torch.float32)[:, None] * self.inv_freq).double()

    def unrotated(self, head: int, position: int) -> Tensor:
        """A query head's query before RoPE, as complex pairs [D/2]."""
        return pairs(self.past[head, position]) * torch.exp(-1j * self.angle([position])[0])

    @property
    def group(self) -> range:
        """The query heads of this KV head."""
        size = len(self.past) // len(self.heads)
        return range(self.head * size, (self.head + 1) * size)

    @property
    def candidates(self) -> list[Token]:
        return self.tokens[: len(self.tokens) - self.window]

    def noise(self, position: int) -> float:
        return uniform(self.seed, (position, self.layer * 65536 + self.head, self.number, 1))

    def logits(self, head: int) -> Tensor:
        """q.k / sqrt(D) over the candidates of a KV head: [G, W, c], float32."""
        group = len(self.queries) // len(self.heads)
        tokens = self.heads[head][: len(self.tokens) - self.window]
        keys = torch.stack([token.k for token in tokens]).float()
        return self.queries[head * group : (head + 1) * group].float() @ keys.T / math.sqrt(keys.shape[-1])


def random(e: Eviction) -> list[float]:
    return [e.noise(token.position) for token in e.candidates]


def value_range(e: Eviction) -> list[float]:
    return [token.v_range for token in e.candidates]


def tova(e: Eviction) -> list[float]:
    rows = [e.logits(head)[:, -1].softmax(-1) for head in range(len(e.heads))]
    return torch.cat(rows).mean(0).tolist()


def h2o(e: Eviction) -> list[float]:
    return [token.mass for token in e.candidates]


def snapkv(e: Eviction, kernel: int = 5) -> list[float]:
    return snapkv_score(e, kernel)


def rkv(e: Eviction, lam: float = 0.1, kernel: int = 7, threshold: float = 0.5) -> list[float]:
    attention = e.logits(e.head).amax(0).softmax(-1).mean(0).tolist()
    half = kernel // 2
    importance = [max(attention[max(0, i - half) : i + half + 1]) for i in range(len(attention))]
    return [lam * a - (1 - lam) * r for a, r in zip(importance, redundancy(e, threshold), strict=False)]


def redundancy(e: Eviction, threshold: float) -> list[float]:
    unit = [token.k.float() / (token.k.float().norm() + 1e-8) for token in e.tokens]
    n = len(unit)
    sums = torch.zeros(n)
    for row in range(n):
        cosines = torch.stack(unit) @ unit[row]
        cosines[row] = 0
        matches = [column for column in range(n) if cosines[column] > threshold]
        cosines[matches[-1] if matches else 0] = 0
        sums += cosines
    return (sums / n).softmax(0).tolist()


def gkv(e: Eviction, alpha: float = 0.8, lam: float = 0.5) -> list[float]:
    n = len(e.candidates)
    keys, positions = torch.stack([t.k for t in e.tokens]).float(), torch.tensor([t.position for t in e.tokens])
    local = torch.zeros(n)
    for i in range(e.window):
        rows = e.queries[e.group.start : e.group.stop, i].float() @ keys.T / math.sqrt(keys.shape[-1])
        rows = rows.masked_fill(positions > e.seen - e.window + i, -math.inf)
        local += rows.softmax(-1).amax(0)[:n] / e.window
    for token, f in zip(e.candidates, (local / local.max()).tolist(), strict=True):
        token.memory = max(alpha * token.memory, f)
    r = torch.tensor(redundancy(e, 0.5))[:n]
    return [lam * t.memory - (1 - lam) * x for t, x in zip(e.candidates, (r / r.max()).tolist(), strict=True)]


def pairs(x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.complex(x[:half].float().double(), x[half:].float().double())


def expected_attention(e: Eviction, future: int = 512, covariance: bool = True, epsilon: float = 0.0) -> list[float]:
    to_come = e.angle(range(e.seen, e.seen + future))  # [F, D/2]
    c, s = torch.diag(to_come.cos().mean(0)), torch.diag(to_come.sin().mean(0))
    rotation = torch.cat((torch.cat((c, -s), 1), torch.cat((s, c), 1)))  # R, [D, D]
    ranked = [t for t in e.tokens if t.position >= e.sinks]
    keys = torch.stack([t.k.float().double() for t in ranked])
    d, attention = keys.shape[1], torch.zeros(len(ranked), dtype=torch.float64)
    for head in e.group:
        before = [e.unrotated(head, p) for p in range(e.seen - e.window, e.seen)]
        q = torch.stack([torch.cat((z.real, z.imag)) for z in before])
        mu = q.mean(0)
        logit = keys @ (rotation @ mu) / math.sqrt(d)
        if covariance:
            sigma = rotation @ ((q - mu).T @ (q - mu) / len(q)) @ rotation.T
            logit += ((keys @ sigma) * keys).sum(1) / (2 * d)
        attention += logit.softmax(0) / len(e.group)
    got = {t.position: float(a) for t, a in zip(ranked, attention, strict=True)}
    return [(got.get(t.position, 0.0) + epsilon) * float(t.v.float().norm()) for t in e.candidates]


def triattention(e: Eviction, stats: str | None = None) -> list[float]:
    assert stats is None
    keys = [pairs(t.k) for t in e.tokens]
    best = [-math.inf] * len(keys)
    turns = torch.exp(1j * e.angle([e.seen + 2**i for i in range(17)])).mean(0)
    for head in e.group:
        before = torch.stack([e.unrotated(head, p) for p in range(e.seen)])
        m, a = before.mean(0), before.abs().mean(0)
        raw = [float((m * turns * k.conj()).real.sum() + ((a - m.abs()) * k.abs()).sum()) for k in keys]
        mean = sum(raw) / len(raw)
        std = math.sqrt(sum((x - mean) ** 2 for x in raw) / (len(raw) - 1))
        best = [max(b, (x - mean) / std) for b, x in zip(best, raw, strict=True)]
    return best[: len(e.candidates)]


def leverage(e: Eviction, rank: int, number: int) -> list[float]:
    d = len(e.tokens[0].k)
    rows = []
    for i in range(d * rank):
        words = philox(e.seed, (i, e.layer * 65536, number, 2))
        u, w = (((word >> 9) + 0.5) / 2**23 for word in words[:2])
        rows.append(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * w) / math.sqrt(rank))
    g = torch.tensor(rows).view(d, rank)
    return [float((t.k.float() @ g).square().sum() * (t.v.float() @ g).square().sum()) for t in e.candidates]


def curdkv(e: Eviction, rank: int = 20) -> list[float]:
    return leverage(e, rank, 0)


def vase_dkv(e: Eviction, rank: int = 20) -> list[float]:
    return leverage(e, rank, e.number)


def snapkv_score(e: Eviction, kernel: int) -> list[float]:
    a = e.logits(e.head).softmax(-1).mean(1)  # [G, c]
    half, out = kernel // 2, []
    for i in range(a.shape[1]):
        out.append(float(a[:, max(0, i - half) : i + half + 1].sum(1).div(kernel).mean()))
    return out


def streaming(e: Eviction) -> list[float]:
    return [float(token.position) for token in e.candidates]


def vase_attnv(e: Eviction, large: int | None = None, kernel: int = 5) -> list[float]:
    candidates = e.candidates
    weight = snapkv_score(e, kernel)
    pinned = [i for i, t in enumerate(candidates) if e.sinks <= t.position < e.pin]
    sinks = [i for i, t in enumerate(candidates) if t.position < e.sinks]
    n_large = min(e.budget // 4 if large is None else large, e.budget - e.window - len(pinned))
    ranked = [i for i in range(len(candidates)) if i not in pinned and i not in sinks]
    ranked.sort(key=lambda i: (candidates[i].v_range, i), reverse=True)
    kept = set(sinks) | set(ranked[: max(0, n_large - len(sinks))])
    out = []
    for i, token in enumerate(candidates):
        u = torch.tensor(e.noise(token.position), dtype=torch.float32)
        gumbel = -torch.log(-torch.log(u))
        out.append(math.inf if i in kept else float(torch.log(torch.tensor(weight[i])) + gumbel))
    return out


POLICIES: dict[str, Priority] = {
    "streaming": streaming,
    "random": random,
    "value-range": value_range,
    "tova": tova,
    "h2o": h2o,
    "snapkv": snapkv,
    "rkv": rkv,
    "gkv": gkv,
    "curdkv": curdkv,
    "vase-attnv": vase_attnv,
    "vase-dkv": vase_dkv,
    "expected-attention": expected_attention,
    "triattention": triattention,
}


class Naive:
    """A decoder from plain weights under Hugging Face names.

    Args:
        config: a ``ringkv`` ModelConfig, for its numbers only.
        weights: name -> tensor, all of one dtype.
    """

    def __init__(self, config: Any, weights: dict[str, Tensor]) -> None:
        self.c, self.w = config, weights
        self.closest = math.inf  # smallest relative distance between a victim's priority and a survivor's
        self.dtype = weights["model.embed_tokens.weight"].dtype

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.c.rms_eps).sqrt() * self.w[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rope(self, x: Tensor, position: Tensor) -> Tensor:
        """x [n, heads, D] at position [n]."""
        d = self.c.head_dim
        angle = (position.float()[:, None] * self.inv_freq()).repeat(1, 2)[:, None]  # [n, 1, D]
        turned = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), dim=-1)
        return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)

    def inv_freq(self) -> Tensor:
        d = self.c.head_dim
        return 1.0 / (self.c.rope.theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))

    def qkv(self, layer: int, h: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, at = self.c, f"model.layers.{layer}.self_attn"
        q = self.linear(h, f"{at}.q_proj").view(len(h), c.heads, c.head_dim)
        k = self.linear(h, f"{at}.k_proj").view(len(h), c.kv_heads, c.head_dim)
        v = self.linear(h, f"{at}.v_proj").view(len(h), c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        return self.rope(q, position), self.rope(k, position), v

    def after(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        at = f"model.layers.{layer}"
        x = x + self.linear(attended, f"{at}.self_attn.o_proj")
        h = self.norm(x, f"{at}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(h, f"{at}.mlp.gate_proj"))
        return x + self.linear(gate * self.linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")

    def head(self, x: Tensor) -> Tensor:
        name = "model.embed_tokens" if self.c.tie_embeddings else "lm_head"
        return self.norm(x, "model.norm") @ self.w[name + ".weight"].T

    def run(
        self,
        ids: list[int],
        steps: int,
        *,
        policy: str = "streaming",
        fields: dict[str, object] | None = None,
        budget: int,
        window: int,
        sinks: int = 4,
        pin: int = 0,
        seed: int = 0,
        threshold: float | None = None,
        forced: list[int] | None = None,
    ) -> tuple[list[int], list[list[list[int]]]]:
        """Greedy tokens, and the live positions of every layer and head at the end.

        Args:
            policy: a name of POLICIES, or "full"; ``fields`` are its own.
            threshold: ReFreeKV's, or None to retain all of the prompt.
            forced: tokens to feed instead of the greedy ones.
        """
        c, group, n = self.c, self.c.heads // self.c.kv_heads, len(ids)
        rules = {"budget": budget, "window": window, "sinks": sinks, "pin": pin, "seed": seed}
        lists: list[list[list[Token]]] = [[[] for _ in range(c.kv_heads)] for _ in range(c.layers)]
        recent: list[list[Tensor]] = [[] for _ in range(c.layers)]  # queries [Hq, D], oldest first
        evictions = [0] * c.layers

        def evict(layer: int, victims: int, number: int) -> None:
            before, past = [list(tokens) for tokens in lists[layer]], torch.stack(recent[layer], dim=1)
            for head, tokens in enumerate(before):
                e = Eviction(before, head, past, self.inv_freq(), layer=layer, number=number, **rules)
                priority = POLICIES[policy](e, **(fields or {}))
                free = [i for i, t in enumerate(e.candidates) if t.position >= max(sinks, pin)]
                free.sort(key=lambda i: (priority[i], i))
                out = set(free[:victims])
                last, first = priority[free[victims - 1]], priority[free[victims]]
                self.closest = min(self.closest, abs(last - first) / (abs(last) + 1e-30))
                lists[layer][head] = [t for i, t in enumerate(tokens) if i not in out]

        # The prompt: dense causal attention, then what is retained.
        x = self.w["model.embed_tokens.weight"][torch.tensor(ids)]
        position = torch.arange(n)
        for layer in range(c.layers):
            q, k, v = self.qkv(layer, self.norm(x, f"model.layers.{layer}.input_layernorm"), position)
            rows, mass = [], torch.zeros(c.kv_heads, n)
            for h in range(c.heads):
                score = q[:, h] @ k[:, h // group].T / math.sqrt(c.head_dim)
                score = score.masked_fill(position[:, None] < position, -math.inf)
                rows.append(score.softmax(-1) @ v[:, h // group])
                mass[h // group] += score.softmax(-1).sum(0) / group
            recent[layer] = list(q)
            keep = set(range(n))
            if threshold is not None and layer >= 2:
                keep = self.refreekv(q[-1], k, threshold)
                keep |= set(range(min(n, max(sinks, pin)))) | set(range(max(0, n - window), n))
            for head in range(c.kv_heads):
                lists[layer][head] = [Token(p, k[p, head], v[p, head], float(mass[head, p])) for p in sorted(keep)]
            if policy != "full" and len(keep) >= budget + window:
                evict(layer, len(keep) - budget, 0)
            x = self.after(layer, x, torch.stack(rows, dim=1).flatten(1))
        out = [int(self.head(x[-1:]).argmax())]
        for step in range(steps - 1):
            token = forced[step] if forced else out[-1]
            self.step(token, n + step, lists, recent)
            for layer in range(c.layers):
                if policy != "full" and len(lists[layer][0]) == budget + window:
                    evictions[layer] += 1
                    evict(layer, window, evictions[layer])
            out.append(int(self.last.argmax()))
        return out, [[[t.position for t in tokens] for tokens in layer] for layer in lists]

    def step(self, token: int, at: int, lists: list[list[list[Token]]], recent: list[list[Tensor]]) -> None:
        c, group = self.c, self.c.heads // self.c.kv_heads
        x = self.w["model.embed_tokens.weight"][token][None]
        for layer in range(c.layers):
            q, k, v = self.qkv(layer, self.norm(x, f"model.layers.{layer}.input_layernorm"), torch.tensor([at]))
            rows = []
            for h in range(c.heads):
                if h % group == 0:
                    lists[layer][h // group].append(Token(at, k[0, h // group], v[0, h // group]))
                tokens = lists[layer][h // group]
                keys, values = torch.stack([t.k for t in tokens]), torch.stack([t.v for t in tokens])
                a = (q[0, h] @ keys.T / math.sqrt(c.head_dim)).softmax(-1)
                for t, got in zip(tokens, a.tolist(), strict=True):
                    t.mass += got / group
                rows.append(a @ values)
            recent[layer].append(q[0])
            x = self.after(layer, x, torch.stack(rows).flatten()[None])
        self.last = self.head(x)[0]

    def refreekv(self, q: Tensor, k: Tensor, threshold: float) -> set[int]:
        """q [Hq, D], k [n, H, D] -> kept positions."""
        n, group = len(k), len(q) // k.shape[1]
        ranking = [*range(min(4, n)), *range(n - 1, 3, -1)]
        squares = [0.0] * len(q)
        rows = [
            (k[:, h // group].float() @ q[h].float() / math.sqrt(q.shape[1])).softmax(-1).tolist()
            for h in range(len(q))
        ]
        whole = sum(math.sqrt(sum(a * a for a in row)) for row in rows) / len(q)
        for length, p in enumerate(ranking, 1):
            for h, row in enumerate(rows):
                squares[h] += row[p] ** 2
            if (whole - sum(map(math.sqrt, squares)) / len(q)) / whole <= threshold:
                return set(ranking[:length])
        return set(ranking)
