"""The trace against the ring and the naive decoder: from its records alone it must say what was live, and when."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from naive import Naive
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.apps.trace.trace import Trace
from ringkv.engine import runner
from ringkv.engine.graph import GraphRunner
from ringkv.engine.record import DROPPED, LIVE, PREFILL, Recorder
from ringkv.engine.ring.admit import admit
from ringkv.engine.ring.evict import evict_due
from ringkv.engine.sampling.device import Sampler
from ringkv.kernels.append import value_range
from scripted import Script
from tiny import tiny_config, tiny_decoder, tiny_weights

IDS = torch.randint(97, (120,), generator=torch.Generator().manual_seed(1)).tolist()


def make_engine(ring, lanes=1, **sizes):
    config = tiny_config(**sizes)
    return Engine(tiny_decoder(config, tiny_weights(config)), ring=ring, lanes=lanes)


def params(tokens, **more):
    return SamplingParams(**{"max_tokens": tokens, "seed": 7, "temperature": 0, "on_repetition": "ignore", **more})


def as_lists(live):
    """bool [L, H, T] as the naive decoder tells it."""
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in live]


def ring_live(ring, lane=0):
    return [[sorted(p for p in head if p >= 0) for head in layer] for layer in ring.position[:, lane].tolist()]


@pytest.mark.parametrize("policy", ["streaming", "vase-attnv", "h2o", "rkv", "random"])
@pytest.mark.parametrize(
    "retention, threshold, heads, kv_heads, prompt, pin",
    [
        ("all", None, 4, 2, 3, "none"),
        ("all", None, 4, 1, 120, "none"),
        ("refreekv:threshold=0.3", 0.3, 2, 2, 120, "none"),
        ("refreekv:threshold=0.9", 0.9, 4, 2, 30, "prompt"),
    ],
)
def test_live_sets_over_time(policy, retention, threshold, heads, kv_heads, prompt, pin, tmp_path):
    """After every token what the saved trace says is the ring's live set; at the end the naive decoder's too."""
    ring = RingConfig(64, 8, policy, retention, pin=pin)
    engine = make_engine(ring, heads=heads, kv_heads=kv_heads)
    ids, seen = IDS[:prompt], {}
    for event in engine.stream(ids, params(90), trace=True):
        seen[int(engine.ring.seen[0])] = ring_live(engine.ring)
        done = event.completion
    Trace.of(engine, done).save(tmp_path / "trace")
    trace = Trace.load(tmp_path / "trace")
    assert list(seen) == list(range(prompt, trace.seen + 1))
    assert trace.seen == prompt + 89 == done.ring["seen"]
    assert all(as_lists(trace.live(at)[..., :at]) == live for at, live in seen.items())
    assert trace.evictions == done.ring["evictions_per_layer"]
    assert max(trace.evictions) >= 3
    assert trace.live(prompt)[:, 0].sum(-1).tolist() == done.ring["retained"]
    pinned = prompt if pin == "prompt" else 0
    assert (trace.budget, trace.window, trace.sinks, trace.pin, trace.seed) == (64, 8, 4, pinned, 7)
    assert (trace.policy.split(":")[0], trace.retention) == (policy, done.ring["retention"])
    assert (trace.finish_reason, trace.repetition) == (done.finish_reason, done.repetition)
    want, live = Naive(engine.model.config, tiny_weights(engine.model.config)).run(
        ids, 90, policy=policy, budget=64, window=8, seed=7, pin=pinned, threshold=threshold
    )
    assert done.token_ids == want
    assert as_lists(trace.live()) == live


def test_marks_and_ranges(monkeypatch):
    """Prefill and retention are told apart, and the value range of every token is there, dropped or live."""
    engine = make_engine(RingConfig(24, 8, "vase-attnv", "refreekv:threshold=0.3"))
    ranges, late = {}, {}

    def spied_admit(ring, layer, lane, q, k, v, let_in):
        admit(ring, layer, lane, q, k, v, let_in)
        ranges[layer] = value_range(v.transpose(0, 1).to(ring.v.dtype)), let_in

    def spied_evict_due(ring):
        for layer, head, slot in (ring.position[:, 0] >= 120).nonzero().tolist():
            at = layer, head, int(ring.position[layer, 0, head, slot])
            late[at] = float(ring.v_range[layer, 0, head, slot])
        evict_due(ring)

    monkeypatch.setattr(runner, "admit", spied_admit)
    monkeypatch.setattr(runner, "evict_due", spied_evict_due)
    trace = engine.generate(IDS, params(60), trace=True).trace
    for layer, (values, kept) in ranges.items():
        assert np.array_equal(trace.v_range[layer, :, :120], values.half().numpy())
        let_in = torch.ones(120, dtype=torch.bool) if kept is None else kept.clone()
        let_in[:4] = let_in[-8:] = True
        assert trace.retained[layer] == int(let_in.sum())
        assert ((trace.taken[layer, :, :120] == DROPPED) == ~let_in.numpy()).all()
    assert (trace.taken == PREFILL).any()
    assert (trace.taken == DROPPED).any()
    assert all(trace.v_range[at] == np.float16(value) for at, value in late.items())
    assert {at[2] for at in late} == set(range(120, 179))


def test_beside_neighbours_and_for_samples():
    """Traces of lanes that run together, refilled ones and copies of a prefill included, are those of each alone."""
    ring = RingConfig(24, 8, "vase-attnv", "refreekv:threshold=0.3")
    one, many = make_engine(ring), make_engine(ring, lanes=3)
    prompts = [IDS[:5], IDS[:70], IDS[:30], IDS[40:]]
    sampled = params(50, temperature=1.0)
    alone = [one.generate(ids, sampled, trace=True) for ids in prompts]
    together = many.generate(prompts, sampled, trace=True)
    two = dataclasses.replace(sampled, n=2)
    alone += one.generate(IDS[:40], two, trace=True)
    together += many.generate(IDS[:40], two, trace=True)
    assert [Trace.of(many, done).sample for done in together] == [0, 0, 0, 0, 0, 1]
    alone, together = ([done.trace for done in every] for every in (alone, together))
    assert not np.array_equal(alone[-1].taken, alone[-2].taken)
    for a, b in zip(alone, together, strict=True):
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("token_ids", "taken", "evicted_at"))
        assert np.array_equal(a.v_range, b.v_range)


def test_a_surplus_step_is_not_in_it():
    """Read one step late, the ring may have evicted after the last token that is reported."""
    ring = RingConfig(16, 2, "vase-attnv", "all")
    eager, late = make_engine(ring), make_engine(ring)
    late._runner = GraphRunner(
        late.model, late.ring, Sampler(1, 97, late.model.device, static=True), late._runner.steering, lambda step: step
    )
    for tokens in range(20, 24):
        stop = eager.generate(IDS[:5], params(tokens)).token_ids[-1]
        wanted = params(40, stop_token_ids=(stop,), min_tokens=tokens - 1)
        a, b = (engine.generate(IDS[:5], wanted, trace=True).trace for engine in (eager, late))
        assert a.seen == b.seen
        assert np.array_equal(a.taken, b.taken)
        assert np.array_equal(a.evicted_at, b.evicted_at)
        assert np.array_equal(a.v_range, b.v_range)


def test_tokens_past_the_end_are_left_out():
    """A request cancelled two steps late, window 1: the ring has read 5 and 6, and evicted 1 and then 5."""
    marks, ranges = torch.tensor([[[[0, 6, 2, 3, 4]]]]), torch.tensor([[[[9.0, 8.0, 7.0, 6.0, 5.0]]]])
    recorder = Recorder(SimpleNamespace(layers=1, position=marks, v_range=ranges))
    recorder.reset(0)
    recorder.admitted(0, 0, torch.arange(4), torch.arange(4)[None], torch.ones(1, 4))
    for seen, gone in ((5, 1), (7, 5)):
        live = SimpleNamespace(
            seen=torch.tensor([seen]), position=torch.tensor([[[gone]]]), v_range=torch.full((1, 1, 1), float(gone))
        )
        recorder.evicted([(0, 0)], live, torch.ones(1, 1, 1, dtype=torch.bool))
    record = recorder.record(0, [7, 7, 7, 7], [8, 8], 0)
    assert record.taken.tolist() == [[[LIVE, 1, LIVE, LIVE, LIVE]]]
    assert record.v_range.tolist() == [[[1, 1, 1, 1, 5]]]
    assert record.evicted_at.tolist() == [[5]]


def test_not_asked_for_nothing_is_recorded():
    engine = make_engine(RingConfig(24, 8))
    done = engine.generate(IDS, params(40))
    assert done.trace is None
    traced = engine.generate(IDS, params(40), trace=True)
    assert traced.token_ids == done.token_ids
    assert "trace" not in traced.to_dict()
    assert json.dumps(traced.to_dict())
    assert engine.ring.observers == []
    next(iter(stream := engine.stream(IDS, params(40), trace=True)))
    stream.close()
    assert engine.ring.observers == []


def test_more_evictions_than_it_counts_are_refused():
    engine = make_engine(RingConfig(8, 1, sinks=1))
    with pytest.raises(RingkvError, match=r"^trace: max_tokens and window allow 65534 evictions a layer; .* 65533$"):
        engine.generate([1, 2, 3], params(65539), trace=True)
    engine.cancel(0)
    refused = engine.generate([[1, 2, 3], [4]], [params(70000), params(3)], trace=True)
    assert [done.finish_reason for done in refused] == ["error", "length"]
    with_room = engine.stream([1, 2, 3], params(65538), trace=True)
    next(with_room)
    with_room.close()


def test_texts_join_and_loops_are_found():
    """An emoji of four tokens and half of one, special tokens, and a loop, in the last of its places."""
    script = Script(lambda ids: tokens)
    loop = script.ids("ab")
    tokens = [*script.ids("x\N{GRINNING FACE}y"), *loop * 6, *script.ids("\N{GRINNING FACE}")[:2]]
    wanted = SamplingParams(max_tokens=len(tokens), min_repeat_count=3, min_repeat_span=6, on_repetition="ignore")
    done = script.engine.generate("h\N{GRINNING FACE}", wanted, trace=True)
    trace = Trace.of(script.engine, done)
    assert "".join(trace.texts) == script.tokenizer.decode(trace.token_ids.tolist())
    assert trace.texts.count("\N{GRINNING FACE}") == 2
    assert trace.texts[-1] == "\ufffd"
    assert set(trace.special.values()) == {"<|im_start|>", "<|im_end|>"}
    n = trace.prompt_tokens
    assert trace.repetition == done.repetition
    assert (trace.repetition["period"], trace.repetition["count"]) == (2, 6)
    assert trace.loop() == (n + 6, n + 18)
    assert dataclasses.replace(trace, repetition={**trace.repetition, "count": 2}).loop() == (n + 14, n + 18)
    assert dataclasses.replace(trace, repetition=None).loop() is None


@pytest.fixture(scope="module")
def whole():
    engine = make_engine(RingConfig(24, 8))
    return Trace.of(engine, engine.generate(IDS, params(60), trace=True))


def test_a_file_says_the_same(whole, tmp_path):
    whole.save(tmp_path / "a.trace")
    back = Trace.load(tmp_path / "a.trace")
    for field in dataclasses.fields(Trace):
        assert np.array_equal(getattr(back, field.name), getattr(whole, field.name)), field.name
    with pytest.raises(RingkvError, match=r"^trace = '.*': there is no folder"):
        whole.save(tmp_path / "no" / "a.trace")
    with pytest.raises(RingkvError, match=r"^seen = 119: accepted is 120 to 179$"):
        back.live(119)


def at(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: {"prompt_tokens": 400}, r"taken: \[3, 2, 179\] does not fit 180 tokens, 400 of them"),
        (lambda t: {"texts": t.texts[1:]}, "texts: 179 for 180 tokens"),
        (lambda t: {"texts": "no"}, "texts = 'no': accepted is a list of texts"),
        (lambda t: {"seed": -1}, "seed = -1: accepted is an int >= 0"),
        (lambda t: {"special": {"1": 2}}, "special = "),
        (lambda t: {"repetition": {"unit": [1], "period": 2, "count": 3}}, "repetition = "),
        (lambda t: {"v_range": t.v_range[:, :1]}, r"v_range = \[3, 1, 179\]: accepted is the shape of taken"),
        (lambda t: {"v_range": t.v_range.astype(np.float32)}, "v_range = 'float32"),
        (lambda t: {"token_ids": t.token_ids.astype(np.int64)}, "token_ids = 'int64"),
        (lambda t: {"evicted_at": t.evicted_at[:2]}, "evicted_at: "),
        (lambda t: {"evicted_at": at(t.evicted_at, (0, 1), 125)}, "evicted_at: accepted are ascending"),
        (lambda t: {"evicted_at": at(t.evicted_at, (0, 0), 120)}, "evicted_at: accepted are ascending"),
        (lambda t: {"evicted_at": at(t.evicted_at, (0, -1), 180)}, "evicted_at: accepted are ascending"),
        (lambda t: {"evicted_at": at(t.evicted_at, (0, 0), 0)}, "evicted_at: .* is no list of evictions"),
        (lambda t: {"taken": at(t.taken, (0, 0, 3), 77)}, "taken: it names an eviction that did not happen"),
        (lambda t: {"taken": at(t.taken, (0, 0, 178), 1)}, "taken: it names an eviction .* before its token was read"),
        (lambda t: {"taken": at(t.taken, (0, 0, 178), 0)}, "taken: it names an eviction .* before its token was read"),
    ],
)
def test_records_that_contradict_each_other_are_refused(whole, tmp_path, change, message):
    dataclasses.replace(whole, **change(whole)).save(tmp_path / "bad")
    with pytest.raises(RingkvError, match=rf"^trace '.*bad': {message}") as refused:
        Trace.load(tmp_path / "bad")
    assert "\n" not in str(refused.value)


def test_files_that_are_no_traces(whole, tmp_path):
    path = tmp_path / "file"
    whole.save(path)
    data = path.read_bytes()
    cases = {
        "no whole safetensors": [b"", b"hello", data[:-1], data[:3000], b"\xff" * 64],
        "version = '2'": [data.replace(b'"version":"1"', b'"version":"2"')],
        "it is no trace": [data.replace(b'"format":"ringkv-trace"', b'"format":"other-kind-x"')],
        "tensors = ": [data.replace(b'"token_ids":', b'"token_idz":')],
    }
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(RingkvError, match=f"^trace '.*': .*{re.escape(message)}"):
                Trace.load(path)
    for about in ("[]", "{", '{"model": "x"}', "[" * 100_000):
        arrays = {name: getattr(whole, name) for name in ("token_ids", "taken", "v_range", "evicted_at")}
        save_file(arrays, path, {"format": "ringkv-trace", "version": "1", "about": about})
        with pytest.raises(RingkvError, match=r"^trace '.*': (about = |it is no whole)"):
            Trace.load(path)
    with pytest.raises(RingkvError, match=r"^trace '.*nothing': .*[Nn]o such file"):
        Trace.load(tmp_path / "nothing")
    with pytest.raises(RingkvError, match=r"^trace '.*'"):
        Trace.load(tmp_path)


def test_an_error_in_the_middle_leaves_the_trace_so_far():
    engine = make_engine(RingConfig(24, 8))
    forward = engine._runner.model.logits
    calls = []

    def broken(hidden):
        calls.append(1)
        logits = forward(hidden)
        return logits * float("nan") if len(calls) == 30 else logits

    engine._runner.model.logits = broken
    done = engine.generate(IDS, params(60), trace=True)
    assert done.finish_reason == Trace.of(engine, done).finish_reason == "error"
    assert done.trace.seen == 120 + len(done.token_ids) - 1
    assert (done.trace.taken == LIVE).any()


@pytest.mark.parametrize(
    "policy, name",
    [
        ("h2o", "h2o"),
        ("rkv:lam=0.1,kernel=7", "rkv"),
        ("mine:Newest", "mine:Newest"),
        ("a.mine:Newest:shift=0.5", "a.mine:Newest"),
    ],
)
def test_the_name_of_a_policy_is_told_without_its_fields(policy, name):
    told = Trace.policy_name.fget(SimpleNamespace(policy=policy))
    assert told == name
