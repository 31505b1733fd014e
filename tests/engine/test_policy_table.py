"""The table of policies, and adding one's own."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ringkv import Engine, Policy, RingConfig, RingkvError, SamplingParams, register_policy
from ringkv.engine.policies import POLICIES, VaseAttnV, as_policy, policy_table
from ringkv.engine.ring.evict import evict, live_tokens
from ringkv.engine.spec import describe
from rings import fill, make_ring, positions
from tiny import tiny_config, tiny_decoder, tiny_weights


def victims(policy: str | Policy) -> list[int]:
    """Which of eight tokens, one of them a sink and two in the window, go when two must."""
    ring = make_ring(policy, budget=6, window=2, sinks=1)
    fill(ring, 0, 0, torch.ones(2, 2, 4), torch.ones(1, 8, 4), torch.ones(1, 8, 4), scramble=3)
    evict(ring, [(0, 0)])
    (live,) = positions(ring, 0, 0)
    return sorted(set(range(8)) - set(live))


def test_table():
    rows = {row["name"]: row for row in policy_table()}
    assert list(rows) == [
        *("full", "streaming", "random", "tova", "h2o", "snapkv", "rkv", "gkv"),
        *("value-range", "vase-attnv", "curdkv", "vase-dkv", "expected-attention", "triattention"),
    ]
    assert {name: row["params"] for name, row in rows.items() if row["params"]} == {
        "snapkv": {"kernel": 5},
        "rkv": {"lam": 0.1, "kernel": 7, "threshold": 0.5},
        "gkv": {"alpha": 0.8, "lam": 0.5},
        "vase-attnv": {"large": None, "kernel": 5},
        "curdkv": {"rank": 20},
        "vase-dkv": {"rank": 20},
        "expected-attention": {"future": 512, "covariance": True, "epsilon": 0.0},
        "triattention": {"stats": None},
    }
    assert all(row["source"] and row["keeps"] and "\n" not in row["keeps"] for row in rows.values())


@pytest.mark.parametrize(
    "spec, message",
    [
        ("vase", f"policy = 'vase': accepted is {', '.join(POLICIES)}"),
        ("snapkv:kernal=5", "policy snapkv = 'kernal=5': accepted is kernel=..."),
        ("tova:kernel=5", "policy tova = 'kernel=5': accepted is no field at all"),
        ("snapkv:kernel=4", "policy snapkv: kernel = 4: accepted is an odd int >= 1"),
        ("snapkv:kernel=0", "policy snapkv: kernel = 0: accepted is an odd int >= 1"),
        ("snapkv:kernel=x", "policy snapkv: kernel = 'x': accepted is int"),
        ("vase-attnv:large=-1", "policy vase-attnv: large = -1: accepted is an int >= 0"),
        ("vase-attnv:kernel=2", "policy vase-attnv: kernel = 2: accepted is an odd int >= 1"),
        ("rkv:lam=2", "policy rkv: lam = 2.0: accepted is a number from 0 to 1"),
        ("rkv:lam=nan", "policy rkv: lam = nan: accepted is a number from 0 to 1"),
        ("rkv:kernel=6", "policy rkv: kernel = 6: accepted is an odd int >= 1"),
        ("rkv:threshold=-2", "policy rkv: threshold = -2.0: accepted is a number from -1 to 1"),
        ("gkv:alpha=1.1", "policy gkv: alpha = 1.1: accepted is a number from 0 to 1"),
        ("gkv:lam=-1", "policy gkv: lam = -1.0: accepted is a number from 0 to 1"),
        ("expected-attention:future=0", "policy expected-attention: future = 0: accepted is an int >= 1"),
        ("expected-attention:covariance=1", "policy expected-attention: covariance = '1': accepted is bool"),
        (
            "expected-attention:epsilon=-0.1",
            "policy expected-attention: epsilon = -0.1: accepted is a number from 0 to 1",
        ),
        ("vase-dkv:rank=0", "policy vase-dkv: rank = 0: accepted is an int >= 1"),
        ("curdkv:rank=0", "policy curdkv: rank = 0: accepted is an int >= 1"),
    ],
)
def test_refused_by_name(spec, message):
    with pytest.raises(RingkvError, match="^" + re.escape(message) + "$"):
        RingConfig(policy=spec)


def test_fields_of_a_spec():
    assert as_policy("rkv:lam=0.07,threshold=0.4,kernel=1") == POLICIES["rkv"](lam=0.07, threshold=0.4, kernel=1)
    assert as_policy("vase-attnv:large=None") == VaseAttnV()


@pytest.fixture
def table():
    before = dict(POLICIES)
    yield POLICIES
    POLICIES.clear()
    POLICIES.update(before)


def test_register(table):
    @register_policy
    @dataclass(frozen=True)
    class Newest(Policy):
        name = "newest"
        shift: float = 0.0

        def priority(self, live):
            return self.shift - live.position[..., : live.candidates].float()

    assert victims("newest:shift=2") == [4, 5]
    assert policy_table()[-1] == {"name": "newest", "params": {"shift": 0.0}, "source": "", "keeps": ""}
    assert register_policy(Newest) is Newest


OWN = """
from dataclasses import dataclass

from ringkv import Policy


@dataclass(frozen=True)
class Newest(Policy):
    shift: float = 0.0

    def priority(self, live):
        return self.shift - live.position[..., : live.candidates].float()


@dataclass(frozen=True)
class Wanting(Newest):
    name = "wanting"
    least: int = 0


@dataclass(frozen=True)
class Asking(Policy):
    least: int


class Thawed(Policy):
    pass


class Stranger:
    pass


number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a package on the path, with policies of the user's own in its module."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "policies.py").write_text(OWN)
    (tmp_path / name / "broken.py").write_text("import no_such_module_of_mine")
    (tmp_path / name / "worse.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_class_of_ones_own_by_module_and_name(own, table):
    """Oracle: the same class, registered by hand in ``test_register``."""
    policy = RingConfig(policy=f"{own}.policies:Newest:shift=2").policy
    assert (policy.shift, policy.name) == (2.0, f"{own}.policies:Newest")
    assert victims(policy) == [4, 5]
    assert policy == type(policy)(shift=2.0)
    assert as_policy(describe(policy)) == policy
    assert as_policy(f"{own}.policies:Wanting").name == f"{own}.policies:Wanting"
    assert type(policy).__name__ not in POLICIES
    copied = pickle.loads(pickle.dumps(RingConfig(policy=policy)))
    assert copied.policy.name == policy.name
    config = tiny_config()
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(16, 4, policy))
    assert engine.generate([1, 2, 3], SamplingParams(max_tokens=2)).ring["policy"] == policy.name


@pytest.mark.parametrize(
    "spec, message",
    [
        (
            "nowhere:Newest",
            "policy = 'nowhere:Newest': no module nowhere is found; accepted is module:Class, or full, ",
        ),
        ("{}.nowhere:A", "policy = '{}.nowhere:A': no module {}.nowhere is found; accepted is module:Class, or full, "),
        ("{}.policies:Oldest", "policy = '{}.policies:Oldest': module {}.policies has no class Oldest; accepted is "),
        ("{}.policies:number", "policy = '{}.policies:number': module {}.policies has no class number; accepted is "),
        ("{}.policies:Stranger", "policy Stranger: must derive from ringkv.Policy"),
        ("{}.policies:Thawed", "policy Thawed: must be a frozen dataclass (@dataclass(frozen=True) above the class)"),
        ("{}.policies:Newest:shaft=1", "policy {}.policies:Newest = 'shaft=1': accepted is shift=..."),
        ("{}.policies:Newest:shift=x", "policy {}.policies:Newest: shift = 'x': accepted is float"),
        ("{}.policies:Asking", "policy {}.policies:Asking: least is missing; accepted is least=..."),
        ("{}.broken:A", "policy = '{}.broken:A': module {}.broken cannot be imported (ModuleNotFoundError: No module "),
        ("{}.worse:A", "policy = '{}.worse:A': module {}.worse cannot be imported (SyntaxError: "),
        (":Newest", "policy = '': accepted is full, "),
        ("snapkv:Newest", "policy snapkv = 'Newest': accepted is kernel=..."),
    ],
)
def test_a_class_that_is_not_there_or_no_policy(own, spec, message):
    with pytest.raises(RingkvError) as error:
        RingConfig(policy=spec.replace("{}", own))
    assert str(error.value).startswith(message.replace("{}", own))
    assert "\n" not in str(error.value)


def test_register_refuses(table):
    @dataclass(frozen=True)
    class Thief(Policy):
        name = "snapkv"

    @dataclass
    class Thawed(Policy):
        name = "thawed"

    class Plain(POLICIES["snapkv"]):
        name = "plain"

    @dataclass(frozen=True)
    class Nameless(Policy):
        pass

    @dataclass(frozen=True)
    class Odd(Policy):
        name = "a:b"

    class Stranger:
        name = "stranger"

    for cls, message in (
        (Thief, "policy Thief: name = 'snapkv': accepted is a name that is not taken"),
        (Thawed, "policy Thawed: must be a frozen dataclass (@dataclass(frozen=True) below the decorator)"),
        (Plain, "policy Plain: must be a frozen dataclass (@dataclass(frozen=True) below the decorator)"),
        (Nameless, "policy Nameless: name = None: accepted is a text without ':', ',', '=' and spaces"),
        (Odd, "policy Odd: name = 'a:b': accepted is a text without ':', ',', '=' and spaces"),
        (Stranger, "policy Stranger: must derive from ringkv.Policy"),
    ):
        with pytest.raises(RingkvError, match="^" + re.escape(message) + "$"):
            register_policy(cls)
    assert table["snapkv"].__name__ == "SnapKV"
    for wrong in (3, Nameless(), Stranger()):
        with pytest.raises(RingkvError, match=r"or an object of a Policy subclass with a name$"):
            RingConfig(policy=wrong)


@pytest.mark.parametrize(
    "returned, given",
    [
        (torch.zeros(1, 1, 8), "float32 [1, 1, 8]"),
        (torch.zeros(1, 1, 6, dtype=torch.float64), "float64 [1, 1, 6]"),
        ([0.0] * 6, "list"),
    ],
)
def test_priority_of_a_wrong_shape(returned, given):
    class Wrong(Policy):
        name = "wrong"

        def priority(self, live):
            return returned

    with pytest.raises(RingkvError) as error:
        victims(Wrong())
    assert str(error.value) == f"policy wrong: priority returned {given}, accepted is float32 [1, 1, 6]"


@dataclass(frozen=True)
class Counting(Policy):
    """Counts how often each token was looked at, and remembers two numbers a lane."""

    name = "counting"
    slot_state = ("looks",)
    lane_state = {"total": torch.tensor([10.0, 0.5])}  # noqa: RUF012
    answer: str = "ok"

    def priority(self, live):
        return -live.state["looks"][..., : live.candidates]

    def observe(self, live):
        looks = live.state["looks"] + 1
        wrong = {
            "name": {"looked": looks},
            "shape": {"looks": looks[..., 1:]},
            "dtype": {"total": live.state["total"].long()},
        }
        return wrong.get(self.answer, {"looks": looks, "total": live.state["total"] * 2})


def test_state_of_ones_own():
    """Observed at prefill, when a window of queries is new, and before each eviction; every write zeroes its slot."""
    config = tiny_config()
    options = RingConfig(12, 4, Counting(), "all", sinks=1)
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=options, lanes=2)
    ring, runner = engine.ring, engine._runner
    # Per layer and lane: KV heads x slots of four bytes, and two numbers.
    assert ring.state.tensors()["looks"].nbytes == 3 * 2 * 2 * 16 * 4
    assert ring.state.tensors()["total"].tolist() == [[[10.0, 0.5]] * 2] * 3
    without = sum(x.nbytes for name, x in ring.tensors().items() if not name.startswith("state."))
    assert ring.nbytes == without + 3 * 2 * (2 * 16 * 4 + 2 * 4)

    def looks(lane: int) -> list[int]:
        return live_tokens(ring, [(2, lane)]).state["looks"][0, 1].int().tolist()

    ring.reset(1, seed=0)
    runner.prefill(1, list(range(10)))
    assert looks(1) == [1] * 10
    for _ in range(4):
        runner.forward(torch.tensor([0, 1]))
    assert looks(1) == [2] * 10 + [1] * 4
    for _ in range(2):
        runner.forward(torch.tensor([0, 1]))
    # 16 tokens: full. All were looked at, 0 .. 9 for the third time, and of these four of the oldest left.
    assert looks(1) == [3] + [3] * 5 + [2] * 4 + [1] * 2
    assert live_tokens(ring, [(2, 1)]).position[0, 1].tolist() == [0, *range(5, 16)]
    runner.forward(torch.tensor([0, 1]))
    assert looks(1) == [3] + [3] * 5 + [2] * 4 + [1] * 2 + [0]
    assert ring.state.lanes["total"][:, 1].tolist() == [[80.0, 4.0]] * 3
    assert ring.state.lanes["total"][:, 0].tolist() == [[10.0, 0.5]] * 3
    ring.copy_lane(1, 0, sample=0)
    assert looks(0) == looks(1)
    assert ring.unobserved[:, 0].tolist() == [1] * 3
    ring.reset(1, seed=0)
    assert ring.state.lanes["total"][:, 1].tolist() == [[10.0, 0.5]] * 3
    # A long prompt: looked at once as a whole, then ranked down to the budget.
    runner.prefill(1, list(range(90)))
    assert looks(1) == [1] * 12


@pytest.mark.parametrize(
    "answer, message",
    [
        ("name", "policy counting: observe = 'looked': accepted is what it declares: looks, total"),
        ("shape", "policy counting: observe gave looks as float32 [1, 2, 2], accepted is float32 [1, 2, 3]"),
        ("dtype", "policy counting: observe gave total as int64 [1, 2], accepted is float32 [1, 2]"),
    ],
)
def test_state_of_a_wrong_shape(answer, message):
    config = tiny_config()
    ring = RingConfig(12, 4, Counting(answer), "all", sinks=1)
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=ring)
    engine.ring.reset(0, seed=0)
    with pytest.raises(RingkvError, match="^" + re.escape(message) + "$"):
        engine._runner.prefill(0, [1, 2, 3])


def test_state_named_twice():
    class Twice(Counting):
        lane_state = {"looks": torch.tensor(0.0)}  # noqa: RUF012

    with pytest.raises(RingkvError, match=r"^policy counting: a name stands in both slot_state and lane_state$"):
        make_ring(Twice(), budget=12, window=4)


def test_readme_example(table):
    """The example under "Your own policy" runs, and its ring is one to generate with."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    block = re.search(r"^#+ Your own policy$.*?^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert block, "README.md: no python block under 'Your own policy'"
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(block[1], "README.md", "exec", dont_inherit=True), names)
    (name,) = set(POLICIES) - set(table_before := [row["name"] for row in policy_table()][:14])
    ring = names["ring"]
    assert isinstance(ring, RingConfig)
    assert ring.policy.name == name not in table_before
    config = tiny_config()
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=ring)
    steps = ring.capacity + ring.window
    result = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=steps, on_repetition="ignore"))
    assert result.ring["evictions"] == 2
    assert result.ring["policy"] == name
