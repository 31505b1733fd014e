"""Options are accepted or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from ringkv import Policy, ReFreeKV, RingConfig, RingkvError, SamplingParams
from ringkv.engine.policies import H2O, RKV


@pytest.mark.parametrize(
    "field, value",
    [
        ("budget", 0),
        ("budget", -1),
        ("budget", 1.5),
        ("budget", "many"),
        ("budget", True),
        ("budget", None),
        ("window", 0),
        ("window", -3),
        ("window", 2.0),
        ("window", "auto"),
        ("sinks", -1),
        ("sinks", 1.0),
        ("pin", "all"),
        ("pin", None),
        ("policy", "lru"),
        ("policy", 3),
        ("policy", None),
        ("retention", "some"),
        ("retention", 3),
    ],
)
def test_ring_values_are_refused(field, value):
    with pytest.raises(RingkvError) as error:
        RingConfig(**{field: value})
    assert str(error.value).startswith(field)
    assert "accepted is" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "budget, window, sinks, fits", [(13, 8, 4, True), (12, 8, 4, False), (64, 64, 0, False), (65, 64, 0, True)]
)
def test_sinks_and_window_leave_something_to_evict(budget, window, sinks, fits):
    if fits:
        assert RingConfig(budget, window, sinks=sinks).capacity == budget + window
    else:
        with pytest.raises(
            RingkvError, match=rf"sinks \({sinks}\) \+ window \({window}\) = {sinks + window} .* budget \({budget}\)"
        ):
            RingConfig(budget, window, sinks=sinks)


def test_a_ring_is_parsed_once_and_stays_a_frozen_dataclass():
    """Oracle: the same ring with its policy and retention given as objects."""
    named = RingConfig(128, 32, "rkv:lam=0.2", "refreekv:first=2", pin="prompt")
    built = RingConfig(128, 32, RKV(lam=0.2), ReFreeKV(first=2), pin="prompt")
    assert isinstance(named.policy, Policy)
    assert (named, hash(named), repr(named)) == (built, hash(built), repr(built))
    assert named != RingConfig(128, 32, "rkv", "refreekv:first=2", pin="prompt")
    wider = dataclasses.replace(named, budget=256)
    assert (wider.budget, wider.policy, wider.retention, wider.pin) == (256, RKV(lam=0.2), ReFreeKV(first=2), "prompt")
    assert dataclasses.replace(named, policy="h2o").policy == H2O()
    with pytest.raises(RingkvError, match=r"budget \(32\)"):
        dataclasses.replace(named, budget=32)
    assert copy.deepcopy(named) == pickle.loads(pickle.dumps(named)) == named
    with pytest.raises(dataclasses.FrozenInstanceError):
        named.budget = 3
    assert repr(RingConfig(64, 8, "full")) == (
        "RingConfig(budget=64, window=8, policy=Full(), retention=All(), sinks=4, pin='none')"
    )


def test_budget_auto_is_no_number_yet():
    ring = RingConfig("auto")
    assert (ring.budget, ring.least_budget, RingConfig("auto", policy="full").least_budget) == ("auto", 69, 1)
    with pytest.raises(RingkvError, match="budget = 'auto': an engine chooses it"):
        _ = ring.capacity


def test_specs_build_objects():
    ring = RingConfig(policy="vase-attnv:large=7,kernel=3", retention="refreekv:threshold=0.05,first=2")
    assert (ring.policy.large, ring.policy.kernel) == (7, 3)
    assert (ring.retention.threshold, ring.retention.first, ring.retention.whole_layers) == (0.05, 2, 2)
    assert RingConfig(policy="vase-attnv:large=none").policy.large is None
    assert RingConfig(policy=ring.policy).policy is ring.policy
    assert RingConfig().retention.name == "refreekv"


@pytest.mark.parametrize(
    "policy, message",
    [
        ("vase-attnv:largo=7", "largo=7"),
        ("vase-attnv:large", "large=..., kernel=..."),
        ("vase-attnv:large=x", "int or none"),
        ("vase-attnv:kernel=4", "an odd int >= 1"),
        ("vase-attnv:kernel=3,kernel=5", "given twice"),
        ("streaming:x=1", "no field at all"),
    ],
)
def test_specs_are_refused(policy, message):
    with pytest.raises(RingkvError) as error:
        RingConfig(policy=policy)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "retention", ["refreekv:threshold=1", "refreekv:threshold=-0.1", "refreekv:first=-1", "refreekv:whole_layers=x"]
)
def test_retention_fields_are_refused(retention):
    with pytest.raises(RingkvError, match="retention refreekv: "):
        RingConfig(retention=retention)


def test_full_implies_all():
    assert RingConfig(policy="full").retention.name == "all"
    with pytest.raises(RingkvError, match="retention = 'refreekv' with policy 'full': accepted is 'all'"):
        RingConfig(policy="full", retention="refreekv")
    assert RingConfig(budget=4, window=4, policy="full").capacity == 8


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", math.nan),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", 3),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: None}),
        ("seed", 2**64),
        ("seed", 1.0),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", [None]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("thinking", "yes"),
        ("thinking", 1),
        ("max_thinking_tokens", -1),
        ("thinking_message", None),
        ("on_repetition", "retry"),
        ("min_repeat_count", 2),
        ("min_repeat_count", 0),
        ("min_repeat_count", 4.0),
        ("min_repeat_count", True),
        ("min_repeat_span", 0),
        ("min_repeat_span", None),
    ],
)
def test_sampling_values_are_refused(field, value):
    with pytest.raises(RingkvError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(field)
    assert "accepted is" in str(error.value)


def test_sampling_values_are_normalised():
    params = SamplingParams(stop="END", stop_token_ids=[3], logit_bias={"7": 2})
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("END",), (3,), {7: 2.0})
