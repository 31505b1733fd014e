"""Evictions of G-KV, Expected Attention and TriAttention against their authors' code, on the same random tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ringkv.engine.policies import GKV, ExpectedAttention, Policy, TriAttention
from ringkv.engine.ring.admit import admit
from ringkv.engine.ring.evict import evict_due, live_tokens, observe_due
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.storage import Ring
from ringkv.models.config import RopeConfig
from rings import fill, make_ring

GOLDEN = Path(__file__).parents[1] / "golden"
G_KV, EXPECTED, TRI = (
    load_file(GOLDEN / f"{name}.safetensors") for name in ("gkv", "expected_attention", "triattention")
)
CASES = ["case0", "case1", "case2"]
# Of the models whose rotary embeddings the cases of Expected Attention took.
ROPES = {
    "case0": RopeConfig(theta=10000.0),
    "case1": RopeConfig("llama3", 500000.0, 8.0, 8192, 1.0, 4.0),
    "case2": RopeConfig("yarn", 1e6, 4.0, 32768),
}
LAYER, LANE = 1, 1


def ring_for(policy: Policy, part: dict[str, Tensor], sinks: int, **model: Any) -> Ring:
    """A ring of two lanes for the tensors of a case, of which the first lane holds other tokens."""
    budget, window = int(part["budget"]), int(part["window"])
    (heads, _, d), kv_heads = part["q"].shape, len(part["k"])
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": d, "layers": 2, "lanes": 2}
    ring = make_ring(policy, budget=budget, window=window, sinks=sinks, **sizes, **model)
    noise = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(*shape, d, generator=noise) for shape in ((heads, window), *[(kv_heads, budget + 3)] * 2))
    for layer in range(2):
        fill(ring, layer, 0, q, k, v, scramble=9)
    return ring


def part_of(golden: dict[str, Tensor], case: str, part: str) -> dict[str, Tensor]:
    """The tensors of a part of a case, with those of the case."""
    found = {name.removeprefix(f"{case}."): x for name, x in golden.items() if name.startswith(f"{case}.")}
    return found | {name.removeprefix(f"{part}."): x for name, x in found.items() if name.startswith(f"{part}.")}


def kept(ring: Ring) -> list[list[int]]:
    return live_tokens(ring, [(LAYER, LANE)]).position[0].tolist()


def check_neighbour(ring: Ring, before: Tensor) -> None:
    check = ring.position.clone()
    check[LAYER, LANE] = before[LAYER, LANE]
    assert torch.equal(check, before)
    check_integrity(ring)


class Remembering(GKV):
    """G-KV that shows what it computed."""

    def priority(self, live):
        vars(self).update(memory=live.state["memory"], given=super().priority(live))
        return self.given


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fields, variant", [({}, ""), ({"alpha": 0.0}, "no_memory."), ({"lam": 0.1}, "rkv_lambda.")])
def test_gkv_three_evictions(case, fields, variant):
    """Each eviction's memory comes from the one before. What the variants keep differs, so that a part of the authors'
    run stands for each: its memory is put where the ring's own would be."""
    ring = None
    for number in range(3):
        part = part_of(G_KV, case, f"evict{number}")
        if ring is None or variant:
            ring = ring_for(Remembering(**fields), part, sinks=0)
        memory = live_tokens(ring, [(LAYER, LANE)]).state["memory"] if number and not variant else None
        carried = ring.state.slots["memory"].clone()
        fill(ring, LAYER, LANE, part["q"], part["k"], part["v"], number + 1, part["position"])
        if number:
            given = torch.nn.functional.pad(part["memory_in"], (0, 2 * int(part["window"])))
            if memory is not None:  # the golden run's, and the ring's own
                given[:, : memory.shape[-1]] = memory[0]
                torch.testing.assert_close(
                    given[:, : part["memory_in"].shape[-1]], part["memory_in"], rtol=0, atol=2e-6
                )
            table = carried[LAYER, LANE].zero_()
            ring.state.slots["memory"][LAYER, LANE] = table.scatter(1, ring.order[LAYER, LANE].long(), given)
        before = ring.position.clone()
        evict_due(ring)
        torch.testing.assert_close(ring.policy.given[0], part[f"{variant}priority"], rtol=0, atol=2e-6)
        assert kept(ring) == part["position"].gather(1, part[f"{variant}kept"]).tolist()
        if not variant:
            c = part["global"].shape[-1]
            torch.testing.assert_close(ring.policy.memory[0, :, :c], part["global"], rtol=0, atol=2e-6)
            want = torch.nn.functional.pad(part["memory_out"], (0, int(part["window"])))
            live = live_tokens(ring, [(LAYER, LANE)])
            torch.testing.assert_close(live.state["memory"][0], want, rtol=0, atol=2e-6)
        check_neighbour(ring, before)


@pytest.mark.parametrize("case", CASES)
def test_gkv_of_a_prompt(case):
    part = part_of(G_KV, case, "prompt")
    window, n = int(part["window"]), part["k"].shape[1]
    ring = ring_for(Remembering(), part, sinks=0)
    ring.reset(LANE, seed=0)
    q = torch.randn(n, *part["q"].shape[::2], generator=torch.Generator().manual_seed(0))
    q[n - window :] = part["q"].transpose(0, 1)
    for layer in range(2):
        admit(ring, layer, LANE, q, part["k"].transpose(0, 1), part["v"].transpose(0, 1), None)
    ring.start(LANE, n)
    torch.testing.assert_close(ring.policy.given[0], part["priority"], rtol=0, atol=2e-6)
    assert kept(ring) == part["kept"].tolist()
    want = torch.nn.functional.pad(part["memory_out"], (0, window))
    live = live_tokens(ring, [(LAYER, LANE)])
    torch.testing.assert_close(live.state["memory"][0], want, rtol=0, atol=2e-6)
    check_integrity(ring)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", ["decode0", "decode1", "decode2", "prefill"])
@pytest.mark.parametrize("mode, covariance", [("cov", True), ("mean", False)])
@pytest.mark.parametrize("score, epsilon", [("score", 0.0), ("score_eps", 0.01)])
def test_expected_attention(case, step, mode, covariance, score, epsilon):
    """The window's queries, positions to come from the next token on; the authors protect no window, and keep what
    their scores of the candidates say."""
    part = part_of(EXPECTED, case, step)
    window, n = int(part["window"]), part["k"].shape[1]
    part["q"] = part["q"][:, -window:]
    sinks = int(part["n_sink"])
    policy = ExpectedAttention(int(part["n_future"]), covariance, epsilon)
    ring = ring_for(policy, part, sinks, rope=ROPES[case])
    assert torch.equal(ring.inv_freq[LAYER], part["inv_freq"])
    assert ring.config.capacity == n or step == "prefill"
    fill(ring, LAYER, LANE, part["q"], part["k"], part["v"], 3, part["position"])
    variant = "last_window" if step == "prefill" else "true_position_all"
    want = part[f"{variant}.{mode}.{score}"][:, : n - window - sinks]
    given = policy.priority(live_tokens(ring, [(LAYER, LANE)]))[0, :, sinks:]
    torch.testing.assert_close(given, want, rtol=2e-5, atol=0)
    stay = want.topk(ring.config.budget - window - sinks).indices + sinks
    protected = torch.cat((torch.arange(sinks), torch.arange(n - window, n))).expand(len(stay), -1)
    before = ring.position.clone()
    evict_due(ring)
    assert kept(ring) == part["position"].gather(1, torch.cat((stay, protected), 1).sort().values).tolist()
    check_neighbour(ring, before)


def released(tmp_path: Path, part: dict[str, Tensor], layer: int) -> str:
    """A file as the authors' save_head_frequency_stats writes it; the ring's layers get the case's ``layer`` and 0."""
    stats = {}
    for place, own in enumerate((0, layer)):
        for head in range(part["q_mean_real"].shape[1]):
            names = ("q_mean_real", "q_mean_imag", "q_abs_mean")
            stats[f"layer{place:02d}_head{head:02d}"] = {name: part[name][own, head] for name in names}
    metadata = {"rope_style": "half", "head_dim": 2 * part["inv_freq"].numel(), "sampled_heads": []}
    torch.save({"metadata": metadata, "stats": stats}, tmp_path / "stats.pt")
    return str(tmp_path / "stats.pt")


TRI_CASES = [("case0", 0), ("case0", 1), ("case1", 1), ("case2", 0), ("case2", 1), ("case3", 1), ("case3", 2)]
TRI_ROPES = {**ROPES, "case3": RopeConfig(theta=1e6)}


def rounding(part: dict[str, Tensor], layer: int, position: Tensor, seen: int) -> Tensor:
    """What the docstring of TriAttention allows for the angles, and an ulp for each term of the sums: [Hq, n]."""
    mean = torch.hypot(part["q_mean_real"][layer], part["q_mean_imag"][layer]).double()[:, None]  # [Hq, 1, F]
    group = len(mean) // len(position)
    k = torch.complex(*part["k_pre"][layer].double().chunk(2, -1)).abs().repeat_interleave(group, 0)  # [Hq, n, F]
    distance = seen + float((2.0 ** torch.arange(17)).mean())
    turned = part["inv_freq"].double() * (position.repeat_interleave(group, 0)[..., None] + distance)
    largest = part["q_abs_mean"][layer].double()[:, None] * k
    sums = 2.0**-24 * 2 * k.shape[-1] * largest.sum(-1)
    return float(part["attention_scaling"]) ** 2 * (2.0**-24 * (mean * k * turned).sum(-1) + sums)


@pytest.mark.parametrize("case, layer", TRI_CASES)
def test_triattention(tmp_path, case, layer):
    """The authors' vLLM runtime, which protects the window, and ranks what is in it too; raw scores but for the factor
    of yarn, which it applies once more; also raw as the formula gives it in float64."""
    part = part_of(TRI, case, "windowed")
    heads, kv_heads, d = part["trig"].shape[1], part["k"].shape[1], part["k"].shape[3]
    window, scaling = int(part["window"]), float(part["attention_scaling"])
    part["k"], position = part["k"][layer], part["position"][layer]
    part["q"] = torch.zeros(heads, window, d)  # the policy asks for none
    policy = TriAttention(released(tmp_path, part, layer))
    ring = ring_for(policy, part, sinks=0, rope=TRI_ROPES[case])
    assert torch.equal(ring.inv_freq[LAYER], part["inv_freq"])
    fill(ring, LAYER, LANE, part["q"], part["k"], torch.zeros_like(part["k"]), 3, position)
    assert int(ring.seen[LANE]) == int(part["seen"])
    live = live_tokens(ring, [(LAYER, LANE)])
    raw = policy.raw(live)[0] * scaling
    torch.testing.assert_close(raw * scaling, part["raw"][layer], rtol=0, atol=5e-5)
    exact = (part["trig_exact"] + part["extra"])[layer]
    assert ((raw - exact).abs() <= rounding(part, layer, position, int(part["seen"]))).all()
    torch.testing.assert_close(policy.priority(live)[0], part["score"][layer], rtol=0, atol=1e-5)
    before = ring.position.clone()
    observe_due(ring, ring.counts == ring.config.capacity)
    evict_due(ring)
    assert kept(ring) == position.gather(1, part["kept"][layer]).tolist()
    assert kv_heads == len(part["k"])
    check_neighbour(ring, before)


@pytest.mark.parametrize("case, rope", [("calib0", "case0"), ("calib1", "case2")])
def test_calibration(case, rope):
    """What a prompt's queries leave in the lane's state, against the authors' calibrate.py on the queries before RoPE;
    under yarn both have its factor."""
    part = part_of(TRI, case, "")
    q = part["q_pre"][0]  # [Hq, T, D]
    (heads, n, d) = q.shape
    ring = make_ring("triattention", budget=48, window=8, sinks=0, heads=heads, kv_heads=1, head_dim=d, lanes=2,
                     rope=TRI_ROPES[rope])  # fmt: skip
    angle = torch.arange(n).float()[:, None] * ring.inv_freq[0]
    cos, sin = (float(part["attention_scaling"]) * x for x in (angle.cos(), angle.sin()))
    first, second = q.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).transpose(0, 1)
    ring.reset(1, seed=0)
    admit(ring, 0, 1, turned, turned[:, :1], turned[:, :1], None)
    mean = torch.cat((part["q_mean_real"], part["q_mean_imag"]), -1)
    torch.testing.assert_close(ring.state.lanes["q_mean"][:, 1], mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(ring.state.lanes["q_modulus"][:, 1], part["q_abs_mean"], rtol=0, atol=1e-6)
    assert ring.state.lanes["observed"].tolist() == [[0, n]]


def test_triattention_far_into_a_text(tmp_path):
    """Around position 100,000 the error against float64 is within what the docstring says, and not far below it."""
    part = part_of(TRI, "case1", "windowed")
    layer, n, seen = 1, part["k"].shape[2], 100_000
    m = torch.complex(part["q_mean_real"], part["q_mean_imag"])[layer].to(torch.complex128)
    k = torch.complex(*part["k_pre"][layer].double().chunk(2, -1))  # [H, n, F]
    w = part["inv_freq"].double()
    position = torch.arange(0, seen, seen // (n - 1))[-n + 12 :]
    position = torch.cat((position[: n - 12] - 50, torch.arange(seen - 12, seen)))
    part["k"], part["q"] = part["k"][layer], torch.zeros(len(m), 12, 64)
    policy = TriAttention(released(tmp_path, part, layer))
    ring = ring_for(policy, part, sinks=0, rope=TRI_ROPES["case1"])
    angle = position.float()[:, None] * part["inv_freq"]
    rotated = k.to(torch.complex64) * torch.polar(torch.ones_like(angle), angle)
    keys = torch.cat((rotated.real, rotated.imag), -1)
    fill(ring, LAYER, LANE, part["q"], keys, torch.zeros_like(keys), 3, position.expand(2, -1))
    raw = policy.raw(live_tokens(ring, [(LAYER, LANE)]))[0].double()
    distance = seen + 2.0 ** torch.arange(17, dtype=torch.float64)
    future = m * torch.exp(1j * distance[:, None, None] * w).mean(0)  # [Hq, F]
    exact = k * torch.exp(1j * position.double()[:, None] * w)  # [H, n, F]
    group = exact.repeat_interleave(2, 0)
    moduli = part["q_abs_mean"][layer].double() - m.abs()
    want = (future[:, None] * group.conj()).real.sum(-1) + (moduli[:, None] * group.abs()).sum(-1)
    error, bound = (raw - want).abs(), rounding(part, layer, position.expand(2, -1), seen)
    assert (error <= bound).all()
    assert error.max() > 0.02 * bound.max()
