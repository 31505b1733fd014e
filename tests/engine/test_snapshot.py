"""Snapshots: a request that goes on from one. Oracle everywhere: the same request, uninterrupted, ids and tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ringkv import Engine, RingConfig, RingkvError, SamplingParams, Snapshot
from ringkv.engine.graph import GraphRunner
from ringkv.engine.policies import POLICIES
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from scripted import OPENING, Script, byte_tokenizer
from tiny import tiny_config, tiny_decoder, tiny_weights

PROMPT = list(range(40))
PARAMS = SamplingParams(seed=3, temperature=1, max_tokens=70, on_repetition="ignore", ignore_eos=True)
CONFIG = tiny_config(layers=2)
WEIGHTS = tiny_weights(CONFIG, torch.float32)
EVERY = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 68, "stop_token_ids": [5], "logprobs": 2}
EVERY |= {"logit_bias": {7: 1.5}}


def make_engine(policy="vase-attnv", *, lanes=2, budget=24, captured=False, weights=WEIGHTS, **options):
    budget = 160 if policy == "full" else budget
    ring = RingConfig(budget, 8, policy, "all")
    engine = Engine(tiny_decoder(CONFIG, weights), ring=ring, lanes=lanes, **options)
    if captured:
        cpu = torch.device("cpu")
        parts = engine.model, engine.ring, Sampler(lanes, 97, cpu, static=True), Steering(lanes, None, cpu)
        engine._runner = engine._serving.loop.runner = GraphRunner(*parts, eager_graph)
    return engine


def eager_graph(step):
    """Like a graph: it writes the same tensors each time."""
    outputs = step()

    def replay():
        for output, new in zip(outputs, step(), strict=True):
            if output is not None:
                output.copy_(new)
        return outputs

    return replay


def facts(done):
    """All of a completion but for its times."""
    return {name: value for name, value in done.to_dict().items() if name != "timing"}


def same(done, whole):
    assert facts(done) == facts(whole)
    assert done.snapshot.lane.keys() == whole.snapshot.lane.keys()
    for name, table in whole.snapshot.lane.items():
        assert torch.equal(done.snapshot.lane[name], table), name


def snapshots(engine, prompt, params, every=1):
    """(snapshot by the number of tokens, the last completion)."""
    found = {}
    for event in engine.stream(prompt, params, every=every, keep=True):
        if event.snapshot is not None and event.completion is None:
            found[len(event.snapshot.tokens)] = event.snapshot
    return found, event.completion


def resumed(engine, snapshot, params=None, append=None):
    *_, last = engine.resume(snapshot, params, append, keep=True)
    return last.completion


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_is_what_would_have_come(policy, cpu_path, tmp_path):
    """In another engine, in a lane that its neighbour leaves, from the object and from the file."""
    engine, other = (make_engine(policy, backend=cpu_path) for _ in range(2))
    for more in ({}, EVERY):
        params = PARAMS.replace(**more)
        taken, whole = snapshots(engine, PROMPT, params, every=27)
        assert [*taken] == [27, 54]
        neighbour = other.stream([5, 6, 7], PARAMS.replace(seed=8))
        next(neighbour)
        same(resumed(other, taken[27]), whole)
        taken[54].save(tmp_path / "a.thought")
        same(resumed(other, tmp_path / "a.thought"), whole)
        neighbour.close()


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_at_any_token(policy):
    engine = make_engine(policy)
    taken, whole = snapshots(engine, PROMPT, PARAMS.replace(max_tokens=24))
    assert [*taken] == [*range(1, 24)]
    for snapshot in taken.values():
        same(resumed(engine, snapshot), whole)


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_a_step_that_is_launched_ahead_is_in_no_snapshot(policy):
    """The captured step's tokens are read one step late; oracle: the eager runner."""
    eager, captured = make_engine(policy, backend="torch"), make_engine(policy, backend="torch", captured=True)
    params = PARAMS.replace(max_tokens=50, stop_token_ids=[5], presence_penalty=0.5)
    taken, whole = snapshots(eager, PROMPT, params, every=7)
    neighbour = captured.stream([5, 6, 7], PARAMS.replace(seed=8))
    next(neighbour)
    mine, done = snapshots(captured, PROMPT, params, every=7)
    same(done, whole)
    assert [*mine] == [*taken]
    for count, snapshot in mine.items():
        assert snapshot.tokens == taken[count].tokens
        same(resumed(captured if count % 2 else eager, snapshot), whole)
    neighbour.close()


def test_params_may_change():
    """More tokens from one that had ended; another temperature changes what comes and nothing before."""
    engine = make_engine()
    whole = engine.generate(PROMPT, PARAMS, keep=True)
    half = engine.generate(PROMPT, PARAMS.replace(max_tokens=41), keep=True)
    assert (half.snapshot.ended, half.finish_reason) == ("length", "length")
    again = resumed(engine, half.snapshot)
    assert facts(again) == facts(half)
    same(resumed(engine, half.snapshot, PARAMS), whole)
    cold = resumed(engine, half.snapshot, PARAMS.replace(temperature=0, seed=None))
    assert cold.token_ids[:41] == half.token_ids
    assert cold.token_ids != whole.token_ids
    assert cold.ring["seed"] == 3
    for bad, message in (
        ({"max_tokens": 40}, "max_tokens = 40: accepted is more than the 41 tokens that the answer has already"),
        ({"logprobs": 1}, "logprobs = 1: accepted is None, as the snapshot was drawn with"),
        ({"stop_token_ids": half.token_ids[5:6]}, f"stop_token_ids: the answer has token {half.token_ids[5]} already"),
    ):
        with pytest.raises(RingkvError, match=message):
            engine.resume(half.snapshot, PARAMS.replace(**bad))


def test_samples_forks_and_lists():
    """A prompt read once; n samples, forks, and snapshots in a list, are the samples of one request."""
    engine = make_engine(lanes=3)
    wanted = [done.token_ids for done in engine.generate(PROMPT, PARAMS.replace(n=4))]
    assert len({*map(tuple, wanted)}) == 4
    head = engine.read(PROMPT, PARAMS)
    assert head.tokens == []
    assert [done.token_ids for done in engine.generate(head, PARAMS.replace(n=4))] == wanted
    assert [done.token_ids for done in engine.generate(head.fork(4), PARAMS)] == wanted
    assert [done.token_ids for done in engine.generate([head] * 2, PARAMS)] == wanted[:1] * 2
    drawn = [tuple(done.token_ids) for done in engine.generate([head] * 3, PARAMS.replace(seed=None))]
    assert len({*drawn}) == 3
    half = engine.generate(head, PARAMS.replace(max_tokens=20), keep=True).snapshot
    forks = half.fork(3)
    assert all(fork.lane is half.lane for fork in forks)
    ends = [done.token_ids for done in engine.generate(forks, PARAMS)]
    assert ends[0] == wanted[0]
    assert len({*map(tuple, ends)}) == 3
    assert all(end[:20] == half.tokens for end in ends)
    assert [done.sample for done in engine.generate(half, PARAMS.replace(n=3))] == [0, 1, 2]
    assert [done.token_ids for done in engine.generate(half, PARAMS.replace(n=3))] == ends
    with pytest.raises(RingkvError, match="fork: n = 0: accepted is an int >= 1"):
        half.fork(0)


def test_a_cancelled_request_keeps_what_it_had():
    engine = make_engine()
    whole = engine.generate(PROMPT, PARAMS, keep=True)
    stream = engine.stream(PROMPT, PARAMS, keep=True)
    for _ in range(30):
        next(stream)
    engine.cancel(0)
    *_, last = stream
    assert last.completion.finish_reason == "cancelled"
    assert last.completion.snapshot.tokens == last.completion.token_ids
    same(resumed(engine, last.completion.snapshot), whole)


def test_iterate_hands_out_snapshots():
    engine, got = make_engine(), []
    prompts = [PROMPT, [1, 2, 3], [4, 5]]
    results = dict(engine.iterate(prompts, PARAMS, every=30, on_snapshot=lambda *each: got.append(each)))
    assert sorted((index, len(each.tokens)) for index, each in got) == [(i, n) for i in range(3) for n in (30, 60)]
    for index, snapshot in got:
        assert facts(resumed(engine, snapshot)) == facts(results[index])


def script_of(text, tokenizer=None, **options):
    script = Script(lambda ids: [*said, *[script.ids(".")[0]] * 300], tokenizer, **options)
    said = script.ids(text)
    return script, said


EMOJI = "ab\U0001f600cd\U0001f44d\U0001f3fdxy"


@pytest.mark.parametrize(
    "text, params, template",
    [
        (EMOJI, {"max_tokens": 24}, None),
        ("one STOx two STOP three", {"stop": ["STOP"]}, None),
        ("one <|im_start|> tw <|im_end|>", {"stop": ["<|im_start|>x"]}, None),
        ("<think> deep \n thought </think>\n\n the answer ", {}, None),
        (
            "a long thought without an end",
            {"max_thinking_tokens": 9, "thinking_message": " so:", "max_tokens": 30},
            OPENING,
        ),
        ("<think>" + "loop " * 30, {"min_repeat_span": 40, "on_repetition": "close_thought"}, None),
        ("loop " * 30, {"min_repeat_span": 40}, None),
    ],
)
def test_text_goes_on_within_anything(text, params, template):
    """Between the bytes of an emoji, in half a stop string, in a thought, in what closes it, in a loop."""
    script, _ = script_of(text, byte_tokenizer(template) if template else None, lanes=2)
    engine = script.engine
    params = SamplingParams(**{"temperature": 0, "seed": 1, "max_tokens": 56, **params})
    pieces, found = [], []
    for event in engine.stream("Hi", params, every=1, keep=True):
        pieces.append((event.channel, event.text))
        if event.snapshot is not None and event.completion is None:
            found.append((len(pieces), event.snapshot))
    whole = event.completion
    assert len(found) > 8
    for place, snapshot in found:
        at = snapshot.tokens
        assert whole.token_ids[: len(at)] == at
        # The model of the resumed request says what the script says from here on.
        events = list(going_on(script, snapshot))
        assert facts(events[-1].completion) == facts(whole), place
        for channel in ("thinking", "answer"):
            rest = "".join(text for name, text in pieces[place:] if name == channel)
            assert "".join(event.text for event in events if event.channel == channel) == rest


def going_on(script, snapshot, **options):
    """A resumed stream; the script knows a lane by its prompt, so the lane is told of it."""
    engine = script.engine
    put, said = engine._runner.put, script.said

    def told(lane, held, seed, sample):
        put(lane, held, seed, sample)
        said[lane] = len(snapshot.prompt), script.script(snapshot.prompt)

    engine._runner.put = told
    try:
        yield from engine.resume(snapshot, **options)
    finally:
        engine._runner.put = put


def test_the_thing_is_shared_by_nobody():
    """What the engine does later changes no snapshot, and a snapshot's lane is no view of the ring."""
    engine = make_engine(lanes=1)
    half = engine.generate(PROMPT, PARAMS.replace(max_tokens=41), keep=True).snapshot
    before = {name: table.clone() for name, table in half.lane.items()}
    engine.generate(PROMPT[::-1], PARAMS)
    resumed(engine, half, PARAMS)
    for name, table in half.lane.items():
        assert torch.equal(table, before[name]), name
    with pytest.raises(dataclasses.FrozenInstanceError):
        half.seed = 4


def test_bytes_are_constant():
    engine = make_engine()
    taken, whole = snapshots(engine, PROMPT, PARAMS, every=10)
    assert {snapshot.nbytes for snapshot in taken.values()} == {whole.snapshot.nbytes}
    ring = sum(x.nbytes for name, x in engine.ring.tensors().items() if name != "active") // engine.lanes
    assert ring < whole.snapshot.nbytes < ring + 4096


def test_a_traced_or_begun_request_starts_at_its_prompt():
    engine = make_engine()
    half = engine.generate(PROMPT, PARAMS.replace(max_tokens=41), keep=True).snapshot
    for options, name in (({"trace": True}, "trace"), ({"begun": [1]}, "begun")):
        with pytest.raises(RingkvError, match=f"{name}: a snapshot cannot be gone on with by it"):
            engine.stream(half, **options)
    assert isinstance(half, Snapshot)


def test_a_closed_engine_goes_on_from_nothing(tmp_path):
    engine = make_engine("streaming")
    snapshot = engine.read([1, 2, 3])
    snapshot.save(tmp_path / "a")
    engine.close()
    for use in (
        lambda: engine.generate(snapshot),
        lambda: list(engine.stream(snapshot)),
        lambda: list(engine.resume(snapshot, append=[4])),
        lambda: engine.resume(tmp_path / "a"),
        lambda: engine.load(tmp_path / "a"),
        lambda: engine.read([1, 2, 3]),
        lambda: list(engine.iterate([snapshot])),
    ):
        with pytest.raises(RingkvError, match="engine: it is closed"):
            use()
