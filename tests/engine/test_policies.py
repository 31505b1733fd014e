"""What each policy does on eight tokens, worked by hand, and what counts as lowest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ringkv import Engine, Policy, RingConfig, SamplingParams
from ringkv.engine.policies import CurDKV, VaseDKV, as_policy
from ringkv.engine.policies.live import Live
from ringkv.engine.ring.evict import evict, live_tokens, observe_due
from ringkv.engine.ring.storage import Ring
from rings import fill, make_ring, positions
from tiny import tiny_config, tiny_decoder, tiny_weights

# Budget 6, window 2, one sink: eight tokens fill the ring, 0 .. 5 are candidates, 0 is the sink, two must go.
#
# Keys are (ln a, ln b) and queries sqrt(2) times an axis, so that a softmax over some tokens is a / sum(a) or
# b / sum(b). Over the candidates both sums are 20; over the first seven tokens 25, over all eight 40.
A = [6.0, 1, 4, 2, 4, 3, 5, 15]
B = [2.0, 5, 1, 3, 4, 5, 5, 15]
RANGE = [9.0, 2, 5, 2, 1, 3, 1, 1]
ON_A, ON_B = (math.sqrt(2), 0.0), (0.0, math.sqrt(2))
QUERIES = [[ON_A, ON_A], [ON_A, ON_B]]  # two heads of one group; the queries of positions 6 and 7


def example(policy: str | Policy, **changes: object) -> Ring:
    """The ring above, or with other keys, values or queries; slots permuted."""
    keys = torch.tensor([A, B]).log().T[None]  # [1, 8, 2]
    values = torch.tensor([[[x, 0.0] for x in RANGE]])
    parts: dict[str, Any] = {"q": torch.tensor(QUERIES), "k": keys, "v": values, **changes}
    ring = make_ring(policy, budget=6, window=2, sinks=1, head_dim=2)
    fill(ring, 0, 0, **parts, scramble=3)
    return ring


def victims(ring: Ring) -> list[int]:
    evict(ring, [(0, 0)])
    (live,) = positions(ring, 0, 0)
    return sorted(set(range(8)) - set(live))


@pytest.mark.parametrize(
    "policy, expected",
    [
        # The oldest that are not sinks.
        ("streaming", [1, 2]),
        # Ranges 2 5 2 1 3 of 1 .. 5: 4 has the smallest, then 1 and 3 are equal and the older goes.
        ("value-range", [1, 4]),
        # The last queries see a/20 and b/20, their mean is (a + b)/40: 8 6 5 5 8 8.
        ("tova", [2, 3]),
        # Head 0 has a/20 twice, head 1 a/20 and b/20; over both (3a + b)/80: 20 8 13 9 16 14.
        ("snapkv:kernel=1", [1, 3]),
        # Sums over three neighbours: 28 41 30 38 39 30, and the two of 30 go.
        ("snapkv:kernel=3", [2, 5]),
        # Over five: 41 50 66 60 52 39.
        ("snapkv", [1, 5]),
    ],
)
def test_eight_tokens(policy, expected):
    assert victims(example(policy)) == expected


def test_eight_tokens_full():
    assert not as_policy("full").evicts
    config = tiny_config()
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(6, 2, "full", sinks=1))
    result = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
    assert positions(engine.ring, 0, 0) == [list(range(7))] * 2  # the last token is not read again
    assert result.ring["evictions"] == 0


def test_eight_tokens_random(monkeypatch):
    noise = torch.tensor([[[0.1, 0.5, 0.3, 0.9, 0.2, 0.8]]])
    monkeypatch.setattr(Live, "uniform", lambda self: noise)
    assert victims(example("random")) == [2, 4]


def test_eight_tokens_h2o():
    """Query 6 gives a/25 in both heads, query 7 a/40 and b/40; with the mean over heads that is a/25 + (a + b)/80."""
    ring = example("h2o")
    before = torch.tensor([3.0, 0.5, 0.1, 0.3, 0.2, 0.25, 0.0, 0.0])
    ring.state.slots["mass"][0, 0, 0] = torch.zeros(8).scatter(0, ring.order[0, 0, 0].long(), before)
    ring.state.lanes["observed"][0, 0] = 6
    observe_due(ring, ring.counts == 8)
    mass = live_tokens(ring, [(0, 0)]).state["mass"]
    # 1 .. 5 got 0.115 0.2225 0.1425 0.26 0.22; the totals are 0.615 0.3225 0.4425 0.46 0.47.
    gained = torch.tensor([[[0.34, 0.115, 0.2225, 0.1425, 0.26, 0.22, 0.2 + 10 / 80, 30 / 80]]])
    torch.testing.assert_close(mass, before + gained)
    assert ring.state.lanes["observed"].tolist() == [[8]]
    assert victims(ring) == [2, 3]


# Keys on the axes: tokens 0 2 5 along x, 1 3 4 6 along y, 7 against x. Of the alike, the largest column of each row is
# left out. Rows 0 2 5 give columns 0: 2, 2: 1, 5: 0, 7: -3. Rows 1 3 4 6 give columns 1: 3, 3: 3, 4: 2, 6: 0. Row 7
# has no match, leaves out column 0 and gives -1 to columns 2 and 5. Sums: 2 3 0 3 2 -1 0 -3; the redundancy is the
# softmax of the sums / 8: 0.1419 0.1608 0.1105 0.1608 0.1419 0.0975 0.1105 0.0760.
ALONG = [(1, 0), (0, 1), (1, 0), (0, 1), (0, 1), (1, 0), (0, 1), (-1, 0)]
# Under head 0 the softmax of the lengths is 2 8 2 2 4 2 over 20. Head 1 asks for half, so the maximum is head 0's.
LENGTH = [math.log(x) for x in (2, 8, 2, 2, 4, 2, 2, 2)]


@pytest.mark.parametrize(
    "policy, expected",
    [
        # Redundancy alone: 1 and 3.
        ("rkv:lam=0", [1, 3]),
        ("gkv:lam=0", [1, 3]),
        # 0.1 * importance - 0.9 * redundancy: -0.1047 -0.0895 -0.1347 -0.1077 -0.0778.
        ("rkv:kernel=1", [3, 4]),
        # The maximum over seven makes it 8 8 8 8 4 of 20: -0.1047 -0.0595 -0.1047 -0.0877 -0.0678.
        ("rkv", [1, 3]),
        # No two alike: every row leaves out column 0. Columns of x: 2 0 2, of y: 3, less 1 each in x for row 7.
        ("rkv:lam=0,threshold=1", [1, 3]),
        # Importance alone, without pooling: 8 2 2 4 2; of the equal ones the older.
        ("rkv:lam=1,kernel=1", [2, 3]),
    ],
)
def test_eight_tokens_rkv(policy, expected):
    keys = torch.tensor([ALONG]).float() * torch.tensor(LENGTH)[:, None]
    # Against x the length counts negative; the candidates' are all positive.
    both = torch.tensor([[[math.sqrt(2)] * 2] * 2, [[math.sqrt(2) / 2] * 2] * 2])
    ring = example(policy, k=keys, q=both)
    if policy == "rkv":
        sums = torch.tensor([2.0, 3, 0, 3, 2, -1, 0, -3])
        torch.testing.assert_close(live_tokens(ring, [(0, 0)]).redundancy(0.5)[0, 0], sums / 8)
    assert victims(ring) == expected


@pytest.mark.parametrize(
    "policy, expected, seventh",
    [
        # Nothing is remembered: 3 and 1 leave.
        ("gkv:lam=1,alpha=0", [1, 3], [78, 52, 52, 49]),
        # 1 is remembered with 70.2 / 78, of which 56.16 are left, and 2 with 39, which it now surpasses: 3 and 5 leave.
        ("gkv:lam=1", [3, 5], [78, 56.16, 52, 52]),
    ],
)
def test_eight_tokens_gkv(policy, expected, seventh):
    """Query 6 gives a/25 in both heads, and query 7 the larger of a/40 and b/40; together (8a + 5 max(a, b))/200, of
    0 .. 5: 78 33 52 31 52 49, relative to 78. Of the window nothing is remembered."""
    ring = example(policy)
    before = torch.tensor([0, 70.2, 39, 0, 0, 0, 0, 0]) / 78
    ring.state.slots["memory"][0, 0, 0] = torch.zeros(8).scatter(0, ring.order[0, 0, 0].long(), before)
    observe_due(ring, ring.counts == 8)  # alone changes nothing
    assert victims(ring) == expected
    memory = live_tokens(ring, [(0, 0)]).state["memory"][0, 0]
    torch.testing.assert_close(memory, torch.tensor([*seventh, 0, 0]) / 78)


@pytest.mark.parametrize(
    "policy, q, keys, expected",
    [
        # Head 0 asks for a, of which all but the sink have 34, and head 1 for b, of 38: (19a + 17b)/1292 of 1 .. 5 is
        # 104 93 89 144 142, times the lengths 2 5 2 1 3: 208 465 178 144 426.
        ("expected-attention", [[ON_A, ON_A], [ON_B, ON_B]], torch.tensor([A, B]).log().T, [3, 4]),
        # For keys (x, -x) the mean query gives 0 and the two of a head differ: their variance gives exp(x^2 / 2) = b,
        # times the lengths 10 5 6 4 15.
        ("expected-attention", [[ON_A, ON_B]] * 2, torch.tensor([[1.0], [-1.0]]), [2, 4]),
        # Without it all are alike, and the lengths 2 5 2 1 3 decide.
        ("expected-attention:covariance=false", [[ON_A, ON_B]] * 2, torch.tensor([[1.0], [-1.0]]), [1, 4]),
        # (b/38 + 0.25) times the lengths, about: 0.76 1.38 0.66 0.36 1.15.
        ("expected-attention:epsilon=0.25", [[ON_A, ON_B]] * 2, torch.tensor([[1.0], [-1.0]]), [3, 4]),
    ],
)
def test_eight_tokens_expected_attention(policy, q, keys, expected):
    """In a layer without RoPE, where future queries are those of the window."""
    if keys.shape == (2, 1):
        keys = (keys * (2 * torch.tensor(B).log()).sqrt()).T
    ring = example(policy, q=torch.tensor(q), k=keys[None])
    ring.inv_freq.zero_()
    assert victims(ring) == expected


@pytest.mark.parametrize(
    "mean, modulus, expected",
    [
        # Head 0 asks for x, 0 2 4 6 1 3 4 4 of mean 3 and standard deviation sqrt(26 / 7): of 1 .. 5 the z-scores are
        # -0.52 0.52 1.56 -1.04 0. Head 1 is 0 everywhere, which makes it 0 0.52 1.56 0 0; of the equal the older go.
        ([(1, 0), (0, 0)], [1, 0], [1, 4]),
        # Head 1 scatters, so that lengths count, 3 5 4 6 5 3 4 4 of mean 4.25 and deviation sqrt(7.5 / 7), and are
        # 0.72 -0.24 1.69 0.72 -1.21. The larger of both heads are 0.72 0.52 1.69 0.72 0.
        ([(1, 0), (0, 0)], [1, 1], [2, 5]),
    ],
)
def test_eight_tokens_triattention(mean, modulus, expected):
    """In a layer without RoPE, where no distance counts."""
    keys = torch.tensor([(0.0, 3), (2, 21**0.5), (4, 0), (6, 0), (1, 24**0.5), (3, 0), (4, 0), (4, 0)])
    ring = example("triattention", k=keys[None])
    ring.inv_freq.zero_()
    ring.state.lanes["q_mean"][0, 0] = torch.tensor(mean)
    ring.state.lanes["q_modulus"][0, 0] = torch.tensor(modulus)[:, None]
    assert victims(ring) == expected


def test_eight_tokens_vase_attnv(monkeypatch):
    """Two stay by range: the sink, and 2 (range 5). The rest have weights 8 9 16 14 and are divided by exponential
    times 1 3 1 4: 8 3 16 3.5."""
    times = torch.tensor([[[100.0, 1, 100, 3, 1, 4]]])
    monkeypatch.setattr(Live, "uniform", lambda self: torch.exp(-times))
    assert victims(example("vase-attnv:large=2,kernel=1")) == [3, 5]


def test_eight_tokens_vase_attnv_room(monkeypatch):
    """Pins take from the room for ranges, and are not ranked by theirs: budget 6 - window 2 - pins 1 and 2 leaves two
    of large = 4: the sink and 5."""
    monkeypatch.setattr(Live, "uniform", lambda self: torch.full((1, 1, 6), 0.5))
    ring = example("vase-attnv:large=4,kernel=1")
    ring.pin[0] = 3
    _, kept = ring.policy.weights(live_tokens(ring, [(0, 0)]))
    assert kept[0, 0].tolist() == [True, False, False, False, False, True]
    assert victims(ring) == [3, 4]
    ring = example("vase-attnv:large=0,kernel=1")
    _, kept = ring.policy.weights(live_tokens(ring, [(0, 0)]))
    assert kept[0, 0].tolist() == [True] + [False] * 5


def test_eight_tokens_vase_attnv_equal_ranges():
    """Of equal ranges the older is not kept: 1 and 3 have range 2, and one of them has a place."""
    ring = example("vase-attnv:large=4")
    _, kept = ring.policy.weights(live_tokens(ring, [(0, 0)]))
    assert kept[0, 0].tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("cls", [CurDKV, VaseDKV])
def test_eight_tokens_leverage(cls):
    """Projected on the first axis: k^2 v^2 of 1 .. 5 is 4 9 9 1 16, whatever the second axis holds."""

    class OnTheFirstAxis(cls):
        def projection(self, live):
            return torch.tensor([[[1.0], [0.0]]])

    keys = torch.tensor([[(1.0, 9.0), (2, 7), (1, 1), (3, 0), (1, 9), (2, 0), (1, 1), (1, 1)]])
    values = torch.tensor([[(1.0, 9.0), (1, 5), (3, 0), (1, 1), (1, 9), (2, 0), (1, 1), (1, 1)]])
    assert victims(example(OnTheFirstAxis(rank=1), k=keys, v=values)) == [1, 4]


def test_projections():
    """curdkv's is the same at each eviction, vase-dkv's is not; both are the request's own, of variance 1 / rank."""
    rings = [make_ring(policy, budget=64, window=8, head_dim=64, layers=2) for policy in ("curdkv", "vase-dkv")]
    drawn = []
    for ring in rings:
        for seed, evictions in ((1, 0), (1, 1), (2, 0)):
            ring.reset(0, seed)
            ring.evictions[:] = evictions
            ring.counts[:] = 72
            drawn.append(ring.policy.projection(live_tokens(ring, [(0, 0), (1, 0)])))
    cur, cur_later, cur_other, vase, vase_later, vase_other = drawn
    assert torch.equal(cur, cur_later)
    assert not torch.equal(vase, vase_later)
    distinct = [cur[0], cur[1], cur_other[0], vase[0], vase[1], vase_later[0], vase_other[0]]
    for i, one in enumerate(distinct):
        for other in distinct[:i]:
            assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 4.5 / 1280**0.5
    entries = torch.stack(distinct).double().flatten() * 20**0.5
    assert abs(entries.mean()) < 4.5 / len(entries) ** 0.5
    assert abs(entries.square().mean() - 1) < 4.5 * (2 / len(entries)) ** 0.5


@dataclass(frozen=True)
class Given(Policy):
    """Priorities written in the test."""

    name = "given"
    numbers: tuple[float, ...]

    def priority(self, live):
        return torch.tensor(self.numbers, dtype=torch.float32).expand(*live.slot.shape[:2], -1)


@pytest.mark.parametrize(
    "numbers, expected",
    [
        ((9, 1, 1, 1, 1, 1), [1, 2]),
        ((0, 0.0, -0.0, 0.0, -0.0, -1), [1, 5]),
        ((0, 3, math.nan, 1, -math.inf, 2), [2, 4]),
        ((0, 3, -math.inf, 1, math.nan, 2), [2, 4]),
        ((0, math.nan, math.nan, -math.inf, 5, 5), [1, 2]),
        ((-math.inf, math.inf, math.inf, math.inf, math.inf, math.inf), [1, 2]),
        ((math.nan, math.inf, 1, math.inf, math.inf, math.inf), [1, 2]),
    ],
)
def test_equals_and_strange_numbers(numbers, expected):
    assert victims(example(Given(numbers))) == expected


def test_sampling_with_one_weight():
    """R10: all weight on one token, and two of five sampled ones to go: it stays, the older of the others go."""
    sharp = torch.tensor([[[400.0, 0.0]] * 2] * 2)
    keys = torch.tensor([[(0.0, 0.0), (0, 0), (0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (0, 0)]])
    ring = example("vase-attnv:large=0,kernel=1", q=sharp, k=keys)
    weights, _ = ring.policy.weights(live_tokens(ring, [(0, 0)]))
    assert weights[0, 0].tolist() == [0, 0, 0, 0, 1, 0]
    assert victims(ring) == [1, 2]
