"""Measure what each eviction policy costs in quality, on a real model.

    python bench/quality.py --plot bench/quality.png

There are four parts: the negative log-likelihood of a text under every policy and budget; whether generation falls
into loops when large or small value ranges leave first; what ReFreeKV keeps of prompts of different kinds; and how long
an eviction takes. ``--part`` runs one of them, and ``--quick`` a small version of the first. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringkv import Engine, Policy, RingConfig, SamplingParams, register_policy
from ringkv.bench.common import finish, note, table, timed
from ringkv.engine.policies import GKV, H2O, POLICIES, TriAttention, as_policy
from ringkv.engine.policies.live import Live
from ringkv.engine.ring.evict import evict_due
from ringkv.engine.ring.storage import Ring
from ringkv.kernels.pairs import Pairs
from ringkv.models.checkpoints.open import open_config
from ringkv.models.config import ModelConfig

HERE = Path(__file__).parent
WINDOW, SEEDS = 32, 4
DTYPE = "float32"  # packed weights would add their own rounding to every difference
DRAWS = ("random", "curdkv", "vase-attnv", "vase-dkv")
TAIL, UNIT, REPEATS = 200, 64, 3


@register_policy
@dataclass(frozen=True)
class LargestFirst(Policy):
    """The reverse of ``value-range``: the tokens that VaSE says must stay leave first."""

    name: ClassVar[str] = "largest-first"
    source: ClassVar[str] = "VaSE, arXiv 2606.03928, its counter-experiment"
    keeps: ClassVar[str] = "small value ranges"

    def priority(self, live: Live) -> Tensor:
        """The negative value range."""
        return -live.v_range[..., : live.candidates]


@dataclass(frozen=True)
class PerLane(Policy):
    """One policy for each lane, so that they share each step's pass over the weights. Prompts must fit the ring."""

    name: ClassVar[str] = "per-lane"
    slot_state: ClassVar[tuple[str, ...]] = H2O.slot_state + GKV.slot_state
    policies: tuple[Policy, ...]

    def priority(self, live: Live) -> Tensor:
        """The priorities of each pair, by the policy of its lane."""
        out = torch.empty(*live.slot.shape[:2], live.candidates)
        for policy in dict.fromkeys(self.policies):
            rows = [row for row, (_, lane) in enumerate(live.pairs) if self.policies[lane] == policy]
            if rows:
                out[rows] = policy.priority(select(live, rows))
        return out

    def observe(self, live: Live) -> Mapping[str, Tensor]:
        """The state of h2o and triattention in every lane; the other policies do not read it."""
        return {**H2O().observe(live), **TriAttention().observe(live)}

    def remember(self, live: Live) -> Mapping[str, Tensor]:
        """That of gkv."""
        return GKV().remember(live)

    def start(self, model: ModelConfig) -> Mapping[str, Tensor]:
        """That of triattention; h2o counts the queries as it does."""
        return TriAttention().start(model)


def select(live: Live, rows: list[int]) -> Live:
    """The same view with some of its pairs."""
    per_pair = ("position", "v_range", "slot", "last", "layer", "inv_freq", "seed", "sample", "eviction", "pin")
    return dataclasses.replace(
        live,
        **{name: getattr(live, name)[rows] for name in per_pair},
        pairs=Pairs((live.pairs[row] for row in rows), live.slot.device),
        state={name: tensor[rows] for name, tensor in live.state.items()},
    )


def likelihood(model: str, tokens: int | None, shares: list[int], seeds: int) -> dict[str, Any]:
    """The loss of the text by policy and budget, which is 1/share of its length; policies that draw run once a seed."""
    with Engine.from_pretrained(model, dtype=DTYPE, ring=RingConfig(2048, WINDOW, "full")) as engine:
        ids = tokenize(engine, (HERE / "quality.txt").read_text())[:tokens]
        with timed(f"{len(ids)} tokens, full"):
            full = parts(engine.score(ids))
    note(f"full: {full}")
    runs = [
        (name, seed) for name, cls in POLICIES.items() if cls.evicts for seed in range(seeds if name in DRAWS else 1)
    ]
    policies = tuple(as_policy(name) for name, _ in runs)
    rows: dict[str, dict[str, dict[str, list[float]]]] = {part: {} for part in full}
    for share in shares:
        ring = RingConfig(len(ids) // share, WINDOW, PerLane(policies))
        with (
            Engine.from_pretrained(model, dtype=DTYPE, ring=ring, lanes=len(runs)) as engine,
            timed(f"budget {ring.budget}, {len(runs)} lanes"),
        ):
            scores = engine.score(ids, seeds=[seed for _, seed in runs])
        for (name, _), score in zip(runs, scores, strict=True):
            for part, loss in parts(score).items():
                rows[part].setdefault(name, {}).setdefault(str(ring.budget), []).append(loss)
        for name, row in rows["whole"].items():
            note(f"budget {ring.budget}, {name}: {spread(row[str(ring.budget)])}")
    budgets = [str(len(ids) // share) for share in shares]
    for part, per_policy in rows.items():
        head = [f"NLL, {part}", *(f"budget {budget}" for budget in budgets)]
        body = [[f"`{name}`", *(spread(row[budget]) for budget in budgets)] for name, row in per_policy.items()]
        note(table(head, [["`full`", *[f"{full[part]:.3f}"] * len(budgets)], *body]) + "\n")
    return {"tokens": len(ids), "window": WINDOW, "full": full, "nll": rows}


def parts(score: Tensor) -> dict[str, float]:
    """The loss a token of the whole text, and of its last third, which refers to early facts."""
    return {"whole": float(-score.mean()), "last third": float(-score[-len(score) // 3 :].mean())}


def spread(values: list[float]) -> str:
    """The mean as a text, with the standard deviation if there is more than one value."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the loss against the budget, one line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.axhline(result["full"]["whole"], color="black", linewidth=1, linestyle="--", label="full")
    markers = "osD^v<>PX*h"
    for i, (name, row) in enumerate(result["nll"]["whole"].items()):
        budgets = [int(budget) for budget in row]
        means = [statistics.fmean(values) for values in row.values()]
        errors = [statistics.stdev(values) if len(values) > 1 else 0 for values in row.values()]
        style = {"color": f"C{i}" if i < 10 else "black", "marker": markers[i % len(markers)]}
        axes.errorbar(budgets, means, errors, capsize=3, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel(f"budget (tokens a KV head; the text has {result['tokens']}, window {result['window']})")
    axes.set_ylabel("negative log-likelihood a token")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def generation(model: str, tokens: int, budget: int) -> dict[str, Any]:
    """The share of runs that end in a loop, and of distinct 3-grams, by what leaves first."""
    prompts = json.loads((HERE / "quality_prompts.json").read_text())["generation"]
    params = [
        SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, on_repetition="ignore")
        for seed in range(len(prompts))
    ]
    arms = ("largest-first", "random", "value-range", "vase-attnv")
    policies = tuple(as_policy(name) for name in arms for _ in prompts)
    found: dict[str, list[list[int]]] = {}
    ring = RingConfig(budget, WINDOW, PerLane(policies), "all")
    with (
        Engine.from_pretrained(model, dtype=DTYPE, ring=ring, lanes=len(policies)) as engine,
        timed(f"{len(policies)} lanes"),
    ):
        results = engine.generate(prompts * len(arms), params * len(arms))
    assert all(result.prompt_tokens < ring.capacity for result in results), "a prompt does not fit the ring"
    for i, name in enumerate(arms):
        found[name] = [result.token_ids for result in results[i * len(prompts) : (i + 1) * len(prompts)]]
    whole = RingConfig(budget + 2 * tokens, WINDOW, "full")
    with (
        Engine.from_pretrained(model, dtype=DTYPE, ring=whole, lanes=len(prompts)) as engine,
        timed(f"full, {len(prompts)} lanes"),
    ):
        found["full"] = [result.token_ids for result in engine.generate(prompts, params)]
    rows = {
        name: {
            "loops": statistics.fmean(loops(ids) for ids in runs),
            "distinct": statistics.fmean(distinct(ids) for ids in runs),
        }
        for name, runs in found.items()
    }
    body = [[f"`{name}`", f"{row['loops']:.0%}", f"{row['distinct']:.3f}"] for name, row in rows.items()]
    note(table(["what leaves", "runs that end in a loop", "distinct 3-grams"], body))
    return {"tokens": tokens, "budget": budget, "window": WINDOW, "runs": rows}


def loops(ids: list[int]) -> bool:
    """Whether the last 200 tokens repeat one unit of at most 64 tokens, at least three times."""
    tail = ids[-TAIL:]
    return any(tail[period:] == tail[:-period] for period in range(1, min(UNIT, len(tail) // REPEATS) + 1))


def distinct(ids: list[int]) -> float:
    """The share of different 3-grams among all."""
    grams = list(zip(ids, ids[1:], ids[2:], strict=False))
    return len(set(grams)) / len(grams)


def retention(model: str, thresholds: tuple[float, ...]) -> dict[str, Any]:
    """What is kept by layer, and the loss of the continuation, for 12 prompts of five kinds; nothing is evicted."""
    prompts = json.loads((HERE / "quality_prompts.json").read_text())["retention"]
    rows: dict[str, dict[str, Any]] = {}
    for spec in ("all", *(f"refreekv:threshold={threshold}" for threshold in thresholds)):
        ring = RingConfig(512, 8, "streaming", spec)
        with Engine.from_pretrained(model, dtype=DTYPE, ring=ring, lanes=len(prompts)) as engine, timed(spec):
            each = continuations(engine, prompts)
        shares = torch.tensor([share for share, _ in each])  # [12, L]
        kinds: dict[str, list[float]] = {}
        for prompt, (_, loss) in zip(prompts, each, strict=True):
            kinds.setdefault(prompt["kind"], []).append(loss)
        kept: dict[str, list[float]] = {}
        for prompt, (share, _) in zip(prompts, each, strict=True):
            kept.setdefault(prompt["kind"], []).append(statistics.fmean(share))
        rows[spec] = {
            "nll": statistics.fmean(loss for _, loss in each),
            "nll_by_kind": {kind: statistics.fmean(values) for kind, values in kinds.items()},
            "kept": float(shares.mean()),
            "kept_by_kind": {kind: statistics.fmean(values) for kind, values in kept.items()},
            "kept_by_layer": [round(share, 3) for share in shares.mean(0).tolist()],
        }
    body = [
        [
            f"`{spec}`",
            *(f"{row['kept_by_kind'][kind]:.0%} · {row['nll_by_kind'][kind]:.2f}" for kind in row["kept_by_kind"]),
            f"{row['kept']:.0%} · {row['nll']:.3f}",
        ]
        for spec, row in rows.items()
    ]
    note(table(["kept · NLL", *rows["all"]["kept_by_kind"], "all prompts"], body))
    for spec, row in rows.items():
        note(f"{spec}, kept by layer: " + " ".join(f"{share:.0%}" for share in row["kept_by_layer"]))
    return {"prompts": len(prompts), "rows": rows}


def continuations(engine: Engine, prompts: list[dict[str, str]]) -> list[tuple[list[float], float]]:
    """For each prompt, the share that each layer keeps, and the loss of its continuation, read token by token."""
    following = [tokenize(engine, prompt["continuation"]) for prompt in prompts]
    shares, logits = [], []
    losses: list[list[float]] = [[] for _ in prompts]
    with engine.alone() as runner:
        ring = runner.ring
        for lane, prompt in enumerate(prompts):
            ids = tokenize(engine, prompt["prompt"])
            ring.reset(lane, seed=0)
            logits.append(runner.prefill(lane, ids)[0])
            shares.append([count / len(ids) for count in ring.counts[:, lane].tolist()])
        for step in range(max(map(len, following))):
            tokens = [ids[step] if step < len(ids) else 0 for ids in following]
            for lane in list(ring.running):
                losses[lane].append(float(-logits[lane].log_softmax(-1)[tokens[lane]]))
                if step + 1 == len(following[lane]):
                    ring.stop(lane)
            if ring.running:
                logits = list(runner.forward(torch.tensor(tokens)))
    return [(share, statistics.fmean(loss)) for share, loss in zip(shares, losses, strict=True)]


def cost(model: str, budget: int) -> dict[str, Any]:
    """Milliseconds of an eviction in all layers of one lane, with what its policy observes then; medians of random
    keys, values and queries."""
    config = ModelConfig.from_hf(open_config(model)[1])
    rows = {}
    for name in (name for name, cls in POLICIES.items() if cls.evicts):
        times = []
        for repeat in range(REPEATS + 1):
            ring = Ring(config, RingConfig(budget, WINDOW, name), 1, torch.device("cpu"), torch.float32)
            for storage in (ring.k, ring.v, ring.queries):
                storage.normal_(generator=torch.Generator().manual_seed(repeat))
            ring.counts[:] = ring.config.capacity
            ring.position[:] = ring.order
            ring.count.fill_(ring.config.capacity)
            ring.seen.fill_(ring.config.capacity)
            start = time.perf_counter()
            evict_due(ring)
            times.append(1000 * (time.perf_counter() - start))
        rows[name] = statistics.median(times[1:])  # the first may compile, or allocate
    note(table(["policy", "ms an eviction"], [[f"`{name}`", f"{each:.1f}"] for name, each in rows.items()]))
    return {"budget": budget, "window": WINDOW, "ms": rows}


def tokenize(engine: Engine, text: str) -> list[int]:
    """The token ids of a text without control tokens."""
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, control=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--part", choices=("likelihood", "generation", "retention", "cost"), help="run only this part")
    parser.add_argument(
        "--quick", action="store_true", help="run only the likelihood, with 300 tokens, one budget and two seeds"
    )
    parser.add_argument("--plot", type=Path, help="write a plot of the likelihood to this PNG file")
    options = parser.parse_args()
    result: dict[str, Any] = {"bench": "quality", "model": options.model, "dtype": DTYPE, "quick": options.quick}
    part = "likelihood" if options.quick else options.part
    if part in (None, "likelihood"):
        small = (300, [4], 2) if options.quick else (None, [2, 4, 8], SEEDS)
        result["likelihood"] = likelihood(options.model, *small)
        if options.plot:
            plot(result["likelihood"], options.plot)
    if part in (None, "generation"):
        result["generation"] = generation(options.model, tokens=600, budget=128)
    if part in (None, "retention"):
        result["retention"] = retention(options.model, (0.001, 0.01, 0.05))
    if part in (None, "cost"):
        result["cost"] = cost(options.model, budget=512)
    finish(result)


if __name__ == "__main__":
    main()
