"""Measure the engine on a CPU against its goals: constant time a token, near the floor, faster than others.

    python bench/cpu.py

One run with SmolLM2-135M-Instruct measures a generation of 8,000 tokens under a budget of 512, with the matrix
products alone on the way; the same token ids through transformers in float32, and through llama.cpp if
llama-cpp-python is installed; a prefill of 4,096 tokens; and lanes. All figures are medians. It takes 12 minutes on
two cores, and 2 minutes with ``--quick``, which uses shorter texts. The last line is JSON with ``targets``: {name:
{value, goal, met}}. The value and met are null where llama.cpp is missing. A goal that is missed is printed as such.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringkv import Engine, RingConfig
from ringkv.apps.measure.bench import Clock, copy_bandwidth, peak_bytes, reset_peak
from ringkv.apps.measure.peer import load_peer, peer_times
from ringkv.bench import lanes, llama
from ringkv.bench.common import finish, note, table, timed
from ringkv.engine.cost import bytes_read
from ringkv.engine.live_bytes import LiveBytes
from ringkv.engine.memory import Planner
from ringkv.models.decoder import Decoder, Mlp

PROMPT, BUDGET, AROUND, PASSES = 64, 512, 96, 24
Targets = dict[str, dict[str, Any]]


@dataclass
class Long:
    """One long generation.

    Attributes:
        ids: the prompt and what followed.
        step_ms: milliseconds of each step; the first step comes after PROMPT tokens.
        evicted: for each step, whether a layer evicted in it.
        products_ms: milliseconds of all matrix products of a step, by the number of tokens seen when they were timed.
    """

    ids: list[int]
    step_ms: list[float]
    evicted: list[bool]
    products_ms: dict[int, float]

    def around(self, seen: int) -> float:
        """Median ms of the AROUND steps after ``seen`` tokens, or of the last ones if the run ends before."""
        end = min(seen - PROMPT + AROUND, len(self.step_ms))
        return statistics.median(self.step_ms[max(0, end - AROUND) : end])

    def eviction_share(self) -> float:
        """The extra time of the steps that evict, as a share of the time that all steps would take without it."""
        plain = [ms for ms, evicted in zip(self.step_ms, self.evicted, strict=True) if not evicted]
        usual = statistics.median(plain)
        more = [ms - usual for ms, evicted in zip(self.step_ms, self.evicted, strict=True) if evicted]
        return statistics.median(more) * len(more) / (usual * len(self.step_ms))


@torch.inference_mode()
def products_ms(model: Decoder, rows: int) -> float:
    """Milliseconds of the matrix products of a step alone, the median of PASSES passes."""
    clock, config = Clock(model.device), model.config
    x = torch.randn(rows, config.hidden_size, dtype=model.dtype)
    heads = torch.randn(rows, config.heads * config.head_dim, dtype=model.dtype)
    wide = torch.randn(rows, config.intermediate_size, dtype=model.dtype)
    for _ in range(PASSES):
        clock.mark()
        for layer in model.layers:
            assert isinstance(layer.mlp, Mlp)
            layer.qkv(x), layer.o(heads), layer.mlp.gate_up(x), layer.mlp.down(wide)
        model.head(x)
    clock.mark()
    return statistics.median(clock.between())


def generate(engine: Engine, tokens: int, marks: Sequence[int]) -> Long:
    """Generate greedily on one lane; at each number of seen tokens in ``marks``, time the products."""
    ring = engine.ring
    ids = torch.randint(
        0, engine.model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    run = Long(ids, [], [], {})
    with engine.alone() as runner:
        ring.reset(0, seed=0)
        ids += runner.first(0, runner.prefill(0, ids)).tokens
        before = ring.evicted.sum()
        while len(ids) <= tokens:
            if len(ids) - 1 in marks:
                run.products_ms[len(ids) - 1] = products_ms(engine.model, 1)
            clock = Clock(engine.model.device)
            clock.mark()
            runner.launch()
            ids += runner.collect().tokens
            clock.mark()
            run.step_ms += clock.between()
            run.evicted.append(bool(ring.evicted.sum() > before))
            before = ring.evicted.sum()
    return run


def prefill(engine: Engine, ids: list[int]) -> tuple[float, int, int]:
    """Read a prompt, and then once more while its tensors are counted.

    Returns:
        The median milliseconds of three readings, the most bytes of live tensors beside what was held before, and the
        bytes by which the process grew.
    """
    clock = Clock(engine.model.device)

    def read() -> None:
        runner.ring.reset(0, seed=0)
        runner.prefill(0, ids)

    with engine.alone() as runner:
        reset_peak(engine.model.device)
        held = peak_bytes(engine.model.device) or 0
        for _ in range(3):
            clock.mark()
            read()
        clock.mark()
        grown = (peak_bytes(engine.model.device) or 0) - held
        with LiveBytes() as live:
            read()
    return statistics.median(clock.between()), live.peak, grown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    lengths = [64, 700, 1024] if quick else [64, 700, 1024, 4096, 8000]
    long, prompt = lengths[-1], 1024 if quick else 4096
    targets: Targets = {}

    def target(name: str, value: float | None, goal: float, *, most: bool) -> None:
        met = None if value is None else bool(value <= goal if most else value >= goal)
        targets[name] = {"value": value, "goal": goal, "met": met}

    # With retention "all", all layers evict in the same step.
    engine = Engine.from_pretrained("smollm2", ring=RingConfig(budget=BUDGET, retention="all"))
    dtype = str(engine.model.weight_dtype).removeprefix("torch.")
    bandwidth = copy_bandwidth(engine.model.device)
    with timed(f"{long} tokens, {dtype}"):
        generate(engine, PROMPT + 40, [])  # to warm up
        run = generate(engine, long + AROUND, lengths)
    target("late_over_early", run.around(long) / run.around(700), 1.10, most=True)
    target("eviction_share", run.eviction_share(), 0.06, most=True)
    for name, seen in (("step_over_products_64", 64), ("step_over_products_full_ring", long)):
        target(name, run.around(seen) / run.products_ms[seen], 1.35, most=True)

    with timed(f"prefill of {prompt} tokens"):
        prefill_ms, taken, grown = prefill(engine, run.ids[:prompt])
    packed = engine.model.weight_dtype != engine.model.dtype
    planned = Planner(engine.model.config, engine.model.dtype, prompt, packed).prefill_bytes(engine.ring.config)
    peers: dict[str, dict[int, tuple[float, float]]] = {}
    with timed("transformers"):
        peer = load_peer("smollm2", engine.model.device, torch.float32)
        peers["transformers float32"] = {}
        for seen in dict.fromkeys([*lengths, prompt]):
            first, *steps = peer_times(peer, torch.tensor([run.ids[: seen + 24]]), seen)
            peers["transformers float32"][seen] = first, statistics.median(steps)
        del peer
    for kind in llama.KINDS if llama.installed() else ():
        with timed(f"llama.cpp {kind}"):
            peers[f"llama.cpp {kind}"] = llama.times(
                kind, run.ids, dict.fromkeys([*lengths, prompt]), torch.get_num_threads()
            )

    def ahead(peer: str, seen: int) -> float | None:
        """The step time of a peer over ours; None if the peer is missing."""
        return peers[peer][seen][1] / run.around(seen) if peer in peers else None

    target("transformers_over_us_long", ahead("transformers float32", long), 6, most=False)
    target("transformers_over_us_64", ahead("transformers float32", 64), 3, most=False)
    for kind in llama.KINDS:
        target(f"llama_cpp_{kind}_over_us_long", ahead(f"llama.cpp {kind}", long), 2, most=False)
    target("llama_cpp_f16_over_us_64", ahead("llama.cpp f16", 64), 1 / 1.4, most=False)
    target("transformers_over_us_prefill", peers["transformers float32"][prompt][0] / prefill_ms, 1.5, most=False)
    target("prefill_memory_over_plan", taken / planned, 1, most=True)
    with timed("8 lanes"):
        target("lanes_8_over_1", lanes.measure(8, quick=quick)["ratio"], 4, most=False)

    rows = [["ringkv " + dtype, *(f"{run.around(seen):.1f}" for seen in lengths), f"{prefill_ms / 1e3:.2f}"]]
    rows += [["its products", *(f"{run.products_ms[seen]:.1f}" for seen in lengths), ""]]
    for name, times in peers.items():
        rows += [[name, *(f"{times[seen][1]:.1f}" for seen in lengths), f"{times[prompt][0] / 1e3:.2f}"]]
    note(table(["ms a token after", *map(str, lengths), f"prefill of {prompt}, s"], rows))
    moved = bytes_read(engine.model, 1, int(engine.ring.spans.sum()))
    achieved = moved / run.around(long) / 1e6
    note(f"{achieved:.1f} GB/s in a step, {bandwidth / 1e9:.1f} in a copy")
    note(
        f"the prefill took {taken / 2**20:.0f} MiB of tensors beside weights and ring, {planned / 2**20:.0f} planned; "
        f"the process grew by {grown / 2**20:.0f}"
    )
    for name, each in targets.items():
        value = "not measured" if each["value"] is None else f"{each['value']:.3f}"
        note(f"{name}: {value}, goal {each['goal']:.3g}{'' if each['met'] is not False else ', MISSED'}")
    figures = {"bench": "cpu", "model": "smollm2", "dtype": dtype, "quick": quick, "seed": 0, "budget": BUDGET}
    figures |= {"window": engine.ring.config.window, "policy": engine.ring.policy.name, "backend": engine.backend}
    finish({**figures, "lengths": lengths, "achieved_gb_s": achieved, "copy_gb_s": bandwidth / 1e9, "targets": targets})


if __name__ == "__main__":
    main()
