"""The compiled operations of a CPU against their torch twins, and a step of them against one in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from kernel_checks import (
    assert_as_exact,
    clone,
    layer,
    poisoned,
    summed_and_normed,
    three_ways,
    ulp,
    widened,
)
from ringkv.engine.config import RingConfig
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels import attention, native
from ringkv.kernels.backend import use
from ringkv.kernels.rotate import Angles
from ringkv.kernels.sample import Filters
from ringkv.kernels.table import sample, silu_mul
from tiny import tiny_config, tiny_decoder, tiny_weights

pytestmark = pytest.mark.usefixtures("compiled")

CPU = torch.device("cpu")
# Slots, query heads a KV head, head dim: below and above a part of 64 slots, a group of 8 heads, a vector.
SHAPES = [(63, 1, 64), (100, 3, 64), (64, 7, 80), (1000, 8, 128), (129, 9, 64), (111, 16, 256), (65, 3, 6), (30, 2, 96)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_as_exact_on_the_whole(kernel, twin, exact):
    """``assert_as_exact`` by the root mean square of the rows: how bad the worst is hangs on luck and the processor."""
    unit = ulp(exact.abs().amax(-1), kernel.dtype)
    errors = ((each.double() - exact).abs().amax(-1) / unit for each in (kernel, twin))
    error, own = (float(each.square().mean().sqrt()) for each in errors)
    assert error <= max(2 * own, 1), f"{error:.3g} ulp; the twin: {own:.3g}"


def inputs(ring, group, norm=False, seed=0):
    lanes, kv_heads, _, d = ring.k.shape
    angle = draw(lanes, d // 2, seed=3)
    norms = (1 + 0.2 * draw(d, seed=4), 1 + 0.2 * draw(d, seed=5)) if norm else None
    return draw(lanes, (group + 2) * kv_heads * d, seed=6 + seed), norms, 1e-6, Angles(angle.cos(), angle.sin())


def by_twins(args, ring):
    """What attention gives, and the ring afterwards."""
    ring = clone(ring)
    return attention.attend(*args, ring), ring


def compiled_step(args, ring):
    ring = clone(ring)
    return native.attend(*args, ring), ring


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("slots, group, d", SHAPES)
def test_a_step_in_a_layer(slots, group, d, norm, threads):
    """Results, and what is written: exactly the rows that the twins write. An idle lane's result is 0."""
    results = []
    for seed in range(8):
        ring = replace(layer(3, 2, group, slots, d, 5, torch.float32, seed), active=torch.tensor([True, False, True]))
        args = inputs(ring, group, norm, seed)
        (out, after), (twin_out, twin), (exact_out, exact) = (
            compiled_step(args, ring),
            by_twins(args, ring),
            by_twins(tuple(map(widened, args)), widened(ring)),
        )
        results.append([x[ring.active] for x in (out, twin_out, exact_out)])
        assert (out[1] == 0).all()
        assert_as_exact(after.k, twin.k, exact.k)
        assert_as_exact(after.queries, twin.queries, exact.queries)
        for name in ("k", "queries"):
            before = getattr(ring, name)
            assert torch.equal((getattr(after, name) != before).any(-1), (getattr(twin, name) != before).any(-1)), name
        for name in ("v", "v_range", "position", "order", "count", "evictions", "seen", "active"):
            assert torch.equal(getattr(after, name), getattr(twin, name)), name
        hidden, _ = compiled_step(args, poisoned(ring))
        assert torch.equal(hidden, out)
    assert_as_exact_on_the_whole(*map(torch.cat, zip(*results, strict=True)))


def test_a_lane_not_yet_evicted_reads_its_span_only():
    """Marks behind the span would show."""
    ring = layer(2, 2, 3, 200, 64, 4, torch.float32)
    order = torch.arange(200, dtype=torch.int32).expand(2, 2, 200).contiguous()
    ring = replace(
        ring,
        count=torch.tensor([63, 140], dtype=torch.int32),
        order=order,
        position=order.clone(),
        evictions=torch.zeros(2, dtype=torch.int32),
    )
    args = inputs(ring, 3)
    beyond = order > ring.count[:, None, None]  # a twin goes by the marks alone
    marked = replace(ring, position=ring.position.masked_fill(beyond, -1))
    assert_as_exact(
        compiled_step(args, ring)[0], by_twins(args, marked)[0], by_twins(tuple(map(widened, args)), widened(marked))[0]
    )


def test_alone_among_hidden_slots_a_token_attends_to_itself():
    ring = layer(1, 2, 3, 200, 64, 4, torch.float32)
    ring = poisoned(replace(ring, position=torch.full_like(ring.position, -1)))
    args = inputs(ring, 3)
    values = args[0].view(1, 10, 64)[:, 8:].repeat_interleave(3, 1)
    assert torch.equal(compiled_step(args, ring)[0].view(1, 6, 64), values)


def test_large_logits_stay_finite():
    ring = layer(1, 1, 8, 130, 64, 4, torch.float32)
    args = inputs(ring, 8)
    args = (1000 * args[0], *args[1:])
    assert_as_exact(
        compiled_step(args, ring)[0], by_twins(args, ring)[0], by_twins(tuple(map(widened, args)), widened(ring))[0]
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, -1])
def test_what_is_not_finite_shows_in_its_lane_alone(value, at):
    """In a query (at 0), or in the new value, which only one part of the slots holds (at -1)."""
    ring = layer(2, 1, 3, 200, 64, 4, torch.float32)
    args = inputs(ring, 3)
    well = compiled_step(args, ring)[0]
    args[0][0, at] = value
    out = compiled_step(args, ring)[0]
    assert not out[0].isfinite().all()
    assert torch.equal(out[1], well[1])


def test_a_result_depends_on_neither_threads_nor_neighbours():
    """To the bit."""
    ring = layer(4, 2, 3, 300, 64, 5, torch.float32)
    qkv, norms, eps, angles = inputs(ring, 3, norm=True)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(compiled_step((qkv, norms, eps, angles), ring)[0])
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    tables = ("k", "v", "position", "order", "v_range", "queries", "count", "evictions", "seen", "active")
    for lane in range(4):
        alone = replace(ring, **{name: getattr(ring, name)[lane, None].clone() for name in tables})
        own = Angles(angles.cos[lane, None].clone(), angles.sin[lane, None].clone())
        assert torch.equal(compiled_step((qkv[lane, None].clone(), norms, eps, own), alone)[0][0], results[0][lane])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows, width", [(1, 63), (3, 64), (2, 1000), (40, 576)])
@pytest.mark.parametrize("first", [True, False])
def test_add_rms_norm(rows, width, first):
    x, delta = 3 * draw(rows, width), None if first else draw(rows, width, seed=1)
    weight = 1 + draw(width, seed=2)
    kernel, twin, exact = three_ways(summed_and_normed, x, delta, weight, 1e-6, path="native")
    assert torch.equal(kernel[0], twin[0])
    assert_as_exact(kernel[1], twin[1], exact[1])
    for row in (0, rows - 1):
        alone = native.add_rms_norm(kernel[0][row, None].clone(), None, weight, 1e-6)
        assert torch.equal(alone[0], kernel[1][row])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows, width", [(1, 63), (3, 1024), (20, 1025)])
def test_silu_mul(rows, width):
    gate_up = 4 * draw(rows, 2 * width)
    gate_up[0, :6] = torch.tensor([-200, 200, -88, 88, -0.0, 1e-30])
    assert_as_exact(*three_ways(silu_mul, gate_up, path="native"))
    gate_up[0, 0] = torch.nan
    assert native.silu_mul(gate_up)[0, 0].isnan()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width, rounded", [(1, False), (15, True), (63, True), (2048, False), (5000, True)])
def test_draws_are_the_twins(width, rounded):
    """Rounded logits tie. Rows of a padded vocabulary lie apart."""
    lists = {
        "temperature": [0.6, 1.0, 0.0, 100.0, 1.5, 0.8],
        "top_k": [20, 0, 0, 1, 10**6, 40],
        "top_p": [0.95, 0.9, 1.0, 0.5, 1.0, 0.0],
        "min_p": [0.0, 0.05, 0.0, 0.0, 0.3, 0.0],
    }
    columns = {name: torch.tensor(column) for name, column in lists.items()}
    for left_out in (None, "top_k", "top_p", "min_p"):
        filters = Filters(**(columns | ({left_out: None} if left_out else {})))
        for seed in range(6):
            logits = 3 * draw(6, width + 9, seed=seed)[:, :width]
            logits = logits.round() if rounded else logits
            uniform = torch.rand(6, generator=torch.Generator().manual_seed(seed))
            token, twin, _ = three_ways(sample, logits, filters, uniform, path="native")
            assert torch.equal(token, twin)
            token, twin, _ = three_ways(sample, logits, None, None, path="native")
            assert torch.equal(token, twin)


def test_draws_on_threads_are_those_of_one():
    """Rows long enough for threads to work at once, each in memory of its own."""
    logits, filters = draw(4, 50_000), Filters(torch.ones(4), top_p=torch.full((4,), 0.9))
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append([native.sample(logits, filters, torch.full((4,), u)) for u in (0.1, 0.5, 0.9)])
    torch.set_num_threads(before)
    assert len({tuple(torch.cat(each).tolist()) for each in results}) == 1


def test_silu_mul_number_by_number():
    gate = torch.cat((torch.linspace(-87, 87, 1000), torch.tensor([-3e38, -1e4, -200, 200, 3e38])))
    out, exact = native.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0], silu(gate.double())
    assert ((out.double() - exact).abs() <= 1.75 * ulp(exact, torch.float32)).all()


def test_products_may_overflow_below():
    """Of a whole part: those keys weigh nothing beside the others."""
    ring = layer(1, 1, 1, 128, 16, 4, torch.float32)
    ring = replace(
        ring, k=torch.zeros_like(ring.k), position=torch.arange(128, dtype=torch.int32).expand(1, 1, -1).clone()
    )
    ring.k[:, :, :64, 0] = -1e38
    args = inputs(ring, 1)
    args[0][:, :16] = 1e3
    args[0][:, 16:32] = 0
    angles = Angles(torch.ones(1, 8), torch.zeros(1, 8))
    out, _ = compiled_step((*args[:3], angles), ring)
    twin, _ = by_twins((*args[:3], angles), ring)
    assert out.isfinite().all()
    assert torch.allclose(out, twin, rtol=0, atol=1e-5)


def test_a_full_lane_is_refused():
    """The next slot would lie behind its storage."""
    ring = layer(2, 1, 3, 64, 16, 4, torch.float32)
    ring.count[1] = 64
    with pytest.raises(AssertionError, match="full"):
        compiled_step(inputs(ring, 3), ring)
    ring.active[1] = False
    compiled_step(inputs(ring, 3), ring)


def test_writes_into_the_storage_itself_and_in_its_type():
    """A copy (`.contiguous()`) would lose the write, another type would be misread: such a tensor is refused."""
    ring = layer(2, 2, 3, 63, 64, 5, torch.float32)
    args = inputs(ring, 3)
    for wrong in (
        replace(ring, k=torch.zeros(2, 2, 63, 128)[..., ::2]),
        replace(ring, v=ring.v.double()),
        replace(ring, seen=ring.seen.int()),
    ):
        with pytest.raises(AssertionError):
            native.attend(*args, wrong)
    with pytest.raises(AssertionError):
        native.attend(args[0].half(), *args[1:], ring)
    with pytest.raises(AssertionError):
        native.silu_mul(torch.zeros(4, 8).t())
    with pytest.raises(AssertionError):
        native.sample(torch.zeros(4, 8).t(), None, None)
    with pytest.raises(AssertionError):
        native.sample(torch.zeros(1, 8), Filters(torch.ones(1), torch.ones(1)), torch.ones(1))  # top_k is int64


@pytest.mark.parametrize("policy", ["streaming", "vase-attnv", "h2o"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_steps_follow_float64(family, policy):
    """Logits of a forced text and the live sets, through many evictions: the float64 step equals the naive decoder."""
    config = tiny_config(family)
    weights = tiny_weights(config)
    ids = torch.randint(97, (200,), generator=torch.Generator().manual_seed(2)).tolist()

    def run(path, dtype):
        decoder = tiny_decoder(config, {name: weight.to(dtype) for name, weight in weights.items()})
        ring = Ring(config, RingConfig(40, 8, policy, "all"), 2, CPU, dtype)
        runner = Runner(decoder, ring, Sampler(2, 97, CPU), Steering(2, None, CPU))
        rows, live = [], []
        with use(path):
            for lane in (0, 1):
                ring.reset(lane, seed=7)
                runner.prefill(lane, ids[: 3 + 9 * lane])
            for first, second in zip(ids[3:180], ids[12:], strict=False):
                rows.append(runner.forward(torch.tensor([first, second])))
                check_integrity(ring)
                live.append(ring.position.sort(-1).values)
        return torch.stack(rows), torch.stack(live), ring

    logits, live, ring = run("native", torch.float32)
    twin, twin_live, _ = run("torch", torch.float32)
    exact, exact_live, _ = run("torch", torch.float64)
    assert ring.evicted.min() > 15
    assert torch.equal(live, exact_live)
    assert torch.equal(twin_live, exact_live)
    assert_as_exact_on_the_whole(logits, twin, exact)
