"""The engine object, on tiny models without a tokenizer: ids in, ids out."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref

import pytest
import torch

from naive import Naive
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine import runner
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(budget=40, window=8)


def tiny_engine(ring=RING, *, family="llama", dtype=torch.float64, seed_of_weights=0, **options):
    config = tiny_config(family)
    return Engine(tiny_decoder(config, tiny_weights(config, dtype, seed_of_weights)), ring=ring, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def params(**values):
    return SamplingParams(**{"max_tokens": 90, "ignore_eos": True, **values})


def test_generate_equals_the_naive_decoder():
    engine = tiny_engine(RingConfig(40, 8, "vase-attnv", "refreekv:threshold=0.05"))
    done = engine.generate(prompt(60), params(temperature=0, seed=11))
    want, live = Naive(engine.model.config, tiny_weights(engine.model.config)).run(
        prompt(60), 90, policy="vase-attnv", budget=40, window=8, seed=11, threshold=0.05
    )
    assert done.token_ids == want
    assert done.ring["kept"] == max(len(layer[0]) for layer in live)
    assert done.ring["seen"] == 60 + 90 - 1
    assert done.finish_reason == "length"


def test_score_equals_the_naive_decoder():
    """Log-probabilities of a text that is fed, not drawn: the naive logits after each forced token."""
    engine = tiny_engine()
    text = prompt(150)
    scores = engine.score(text, seeds=[5])[0]
    naive = Naive(engine.model.config, tiny_weights(engine.model.config))
    logits = []
    head = naive.head
    naive.head = lambda x: (logits.append(head(x)[0]), head(x))[1]
    naive.run(text[:1], 149, policy="vase-attnv", budget=40, window=8, seed=5, forced=text[1:])
    want = [float(row.log_softmax(-1)[token]) for row, token in zip(logits, text[1:], strict=True)]
    assert torch.allclose(scores, torch.tensor(want, dtype=scores.dtype), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "ids, seeds, message",
    [
        ("text", None, "ids = 'text': accepted is a list of token ids (see encode)"),
        ([3, 4], [], "seeds = []: accepted is one seed or more, or None"),
        ([3, 4], ["x"], "seed = 'x': "),
    ],
)
def test_score_refuses(ids, seeds, message):
    with pytest.raises(RingkvError, match=re.escape(message)):
        tiny_engine().score(ids, seeds)


def test_score_with_seeds_as_lanes():
    engine = tiny_engine(lanes=2)
    text = prompt(120)
    rows = engine.score(text, seeds=[1, 2, 3])
    assert rows.shape == (3, 119)
    for row, seed in zip(rows, (1, 2, 3), strict=True):
        assert torch.equal(row, engine.score(text, seeds=[seed])[0])
    assert torch.equal(rows[:, :46], rows[:1, :46].expand(3, -1)), "no eviction yet, no difference"
    assert not torch.equal(rows[0], rows[1])
    engine.score(text[:20], seeds=[1, 2, 3])
    assert engine.ring.seen.tolist() == [19, 19], "a lane without a seed of its own waits"
    # The same as one long prompt as long as nothing was evicted.
    whole = tiny_engine(RingConfig(200, 8, "full")).score(text)
    assert torch.allclose(rows[0, :46], whole[:46], rtol=0, atol=1e-9)


def test_lanes_equal_runs_alone():
    """CASES B1, B2, R18: 12 requests over 4 lanes, mixed prompts, seeds and limits, float64."""
    prompts = [prompt(1 + 17 * i, seed=i) for i in range(12)]
    each = [params(seed=i, max_tokens=10 + 13 * (i % 5), temperature=(i % 3) / 2) for i in range(12)]
    together = tiny_engine(lanes=4).generate(prompts, each)
    alone = tiny_engine()
    for one, ids, param in zip(together, prompts, each, strict=True):
        single = alone.generate(ids, param)
        assert one.token_ids == single.token_ids
        keys = ("seen", "kept", "evictions_per_layer", "retained", "seed", "peak_slots")
        assert {key: one.ring[key] for key in keys} == {key: single.ring[key] for key in keys}
    assert max(one.ring["evictions"] for one in together) > 3


def test_requests_are_admitted_in_order_and_lanes_refilled_at_once():
    engine = tiny_engine(lanes=2)
    limits = [5, 60, 5, 5, 5]
    order = [
        index for index, _ in engine.iterate([prompt(3, i) for i in range(5)], [params(max_tokens=n) for n in limits])
    ]
    assert order == [0, 2, 3, 4, 1]


def test_float32_lanes_do_not_depend_on_neighbours_or_place(cpu_path):
    ids, mine = prompt(30), params(seed=9, temperature=1.0)
    runs = []
    for place, neighbours in ((0, 1), (3, 2), (5, 3)):
        engine = tiny_engine(dtype=torch.float32, lanes=6, backend=cpu_path)
        prompts = [prompt(10 + 5 * i, seed=neighbours) for i in range(6)]
        prompts[place] = ids
        each = [params(seed=neighbours + i, max_tokens=50 + i) for i in range(6)]
        each[place] = mine
        runs.append(engine.generate(prompts, each)[place].token_ids)
    assert runs[0] == runs[1] == runs[2]
    rows = tiny_engine(dtype=torch.float32, lanes=5, threads=2, backend=cpu_path).score(prompt(60), seeds=[3] * 5)
    assert torch.equal(rows, rows[:1].expand(5, -1)), "to the bit, with threads that share a product"


def test_a_then_b_then_a(monkeypatch):
    """CASES R14: also after an exception and after an interrupt in mid-step."""
    engine = tiny_engine()
    first = engine.generate(prompt(20), params(seed=1)).token_ids
    engine.generate(prompt(70, 1), params(seed=2))
    assert engine.generate(prompt(20), params(seed=1)).token_ids == first
    with pytest.raises(RingkvError):
        engine.generate([97], params())
    assert engine.generate(prompt(20), params(seed=1)).token_ids == first
    attend, calls = runner.attend, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 20:  # the second of three layers
            raise KeyboardInterrupt
        return attend(*args)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt(70, 1), params(seed=2))
    assert engine.generate(prompt(20), params(seed=1)).token_ids == first


def test_seeds():
    """CASES B3, and the order in which a seed is found."""
    engine = tiny_engine(lanes=3)
    hot = params(temperature=1.0)
    three = engine.generate([prompt(9)] * 3, [hot, hot.replace(seed=4), hot])
    assert three[1].token_ids == tiny_engine(lanes=3).generate([prompt(9)], [hot.replace(seed=4)])[0].token_ids
    assert three[0].token_ids != three[2].token_ids
    assert len({one.ring["seed"] for one in three}) == 3
    again = engine.generate(prompt(9), hot.replace(seed=three[0].ring["seed"]))
    assert again.token_ids == three[0].token_ids
    seeded = [tiny_engine(seed=6).generate([prompt(9)] * 2, hot) for _ in range(2)]
    assert [one.token_ids for one in seeded[0]] == [one.token_ids for one in seeded[1]]
    assert seeded[0][0].token_ids != seeded[0][1].token_ids
    assert engine.generate(prompt(9), params(temperature=0)).ring["seed"] == 0
    assert engine.generate(prompt(9), params(temperature=0, seed=-1)).ring["seed"] == 2**64 - 1


def test_a_bad_request_fails_alone():
    """CASES B4."""
    engine = tiny_engine(RingConfig(budget=40, window=8, policy="full"), lanes=2)
    results = engine.generate([prompt(5), [], [500], prompt(60), prompt(6)], params(max_tokens=20))
    assert [one.finish_reason for one in results] == ["length", "error", "error", "error", "length"]
    assert results[1].error == {"type": "RingkvError", "message": "prompt: it is empty; at least one token is needed"}
    assert "token id = 500" in results[2].error["message"]
    assert (
        "max_tokens = 20: with a prompt of 60 tokens that is 80, and policy full holds 48"
        in results[3].error["message"]
    )
    for lone in ([500], prompt(60), b"\1\2", bytearray(b"\1\2")):
        with pytest.raises(RingkvError):
            engine.generate(lone, params(max_tokens=20))
    assert engine.generate([]) == []


def test_full_takes_what_fits_by_default():
    engine = tiny_engine(RingConfig(budget=40, window=8, policy="full"))
    done = engine.generate(prompt(30), SamplingParams(ignore_eos=True))
    assert done.completion_tokens == 18
    assert done.sampling["max_tokens"] == {"value": 18, "source": "ring"}
    assert done.ring["retention"] == "all"
    assert done.ring["evictions"] == 0


def test_samples_share_one_prefill():
    engine = tiny_engine(lanes=3)
    prefills = []
    prefill = engine._runner.prefill
    engine._runner.prefill = lambda *args: (prefills.append(args), prefill(*args))[1]
    many = engine.generate(prompt(60), params(n=5, seed=3, temperature=1.0))
    assert [one.sample for one in many] == [0, 1, 2, 3, 4]
    assert len(prefills) == 2, "a wave of three lanes, then one of two"
    assert len({tuple(one.token_ids) for one in many}) == 5
    alone = tiny_engine()
    assert alone.generate(prompt(60), params(n=5, seed=3, temperature=1.0))[4].token_ids == many[4].token_ids
    assert alone.generate(prompt(60), params(seed=3, temperature=1.0)).token_ids == many[0].token_ids
    # Where nothing is evicted, the draws alone tell samples apart.
    roomy = tiny_engine(RingConfig(100, 8, "full"), lanes=3).generate(
        prompt(5), params(n=3, temperature=1.0, max_tokens=20)
    )
    assert len({tuple(one.token_ids) for one in roomy}) == 3
    with pytest.raises(RingkvError, match="n = 2"):
        engine.stream(prompt(3), params(n=2))


def test_samples_report_their_own_slots_whoever_used_the_lanes():
    engine = tiny_engine(lanes=3)
    engine.generate([prompt(60)] * 3, params())
    short = params(n=3, temperature=1.0, max_tokens=4)
    assert [one.ring["peak_slots"] for one in engine.generate(prompt(5), short)] == [8, 8, 8]


def test_alone_lends_the_runner_under_the_engines_limits():
    engine, threads = tiny_engine(lanes=3, threads=3), torch.get_num_threads()
    assert threads != 3

    def break_off():
        with engine.alone() as runner:
            assert torch.get_num_threads() == 3
            for lane in range(3):
                engine.ring.reset(lane, lane)
                runner.prefill(lane, prompt(5))
            with pytest.raises(RingkvError, match="it is at work in this thread, or was lent to it"):
                engine.generate(prompt(3))
            assert engine.ring.running == [0, 1, 2]
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert torch.get_num_threads() == threads
    assert engine.ring.running == []
    assert not engine.ring.active.any()


def test_cancel():
    engine = tiny_engine(lanes=2)
    results = {}
    run = engine.iterate(
        [prompt(4, i) for i in range(4)], [params(max_tokens=6), params(), params(), params(max_tokens=9)]
    )
    for index, done in run:
        results[index] = done
        if index == 0:
            engine.cancel(1)
            engine.cancel(2)
    assert [results[i].finish_reason for i in range(4)] == ["length", "cancelled", "cancelled", "length"]
    assert (
        results[1].token_ids
        == tiny_engine(lanes=2)
        .generate(prompt(4, 1), params(seed=results[1].ring["seed"]))
        .token_ids[: len(results[1].token_ids)]
    )


def test_cancel_leaves_a_prefill_between_layers():
    engine = tiny_engine()
    read = []

    def cancel(done, layers):
        read.append((done, layers))
        engine.cancel(0)

    (event,) = engine.stream(prompt(30), params(), on_prefill=cancel)
    assert event.completion.finish_reason == "cancelled"
    assert read == [(1, 3)]
    assert engine.generate(prompt(5), params(max_tokens=3)).completion_tokens == 3


def test_a_row_that_is_not_finite_ends_its_request_only():
    engine = tiny_engine(lanes=2)
    forward = engine._runner._forward
    calls = []

    def broken(token):
        logits = forward(token)
        calls.append(1)
        if len(calls) == 5:
            logits[1] = float("nan")
        return logits

    engine._runner._forward = broken
    good, bad, late = engine.generate([prompt(4, i) for i in range(3)], params(max_tokens=12, temperature=0))
    assert (good.finish_reason, bad.finish_reason, late.finish_reason) == ("length", "error", "length")
    assert bad.error["type"] == "NonFiniteLogits"
    assert len(bad.token_ids) == 5
    assert late.token_ids == tiny_engine(lanes=2).generate(prompt(4, 2), params(max_tokens=12, temperature=0)).token_ids


def test_memory_that_runs_out_in_a_prefill_fails_that_request_only():
    engine = tiny_engine(lanes=2)
    prefill = engine._runner.prefill

    def short(lane, ids, *more):
        if len(ids) == 77:
            raise torch.OutOfMemoryError("no memory left")
        return prefill(lane, ids, *more)

    engine._runner.prefill = short
    results = engine.generate([prompt(4), prompt(77), prompt(5)], params(max_tokens=5))
    assert [one.finish_reason for one in results] == ["length", "error", "length"]
    assert results[1].error["type"] == "OutOfMemoryError"


def test_update_weights_in_place():
    config = tiny_config()
    engine = tiny_engine()
    places = {name: view.data_ptr() for name, view in engine.model.destinations().items()}
    old = engine.generate(prompt(9), params(temperature=0)).token_ids
    engine.update_weights(tiny_weights(config, seed=1))
    new = engine.generate(prompt(9), params(temperature=0)).token_ids
    assert new == tiny_engine(seed_of_weights=1).generate(prompt(9), params(temperature=0)).token_ids != old
    assert {name: view.data_ptr() for name, view in engine.model.destinations().items()} == places
    weights = tiny_weights(config)
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(RingkvError, match=r"model\.norm\.weight"):
        engine.update_weights(weights)
    assert engine.generate(prompt(9), params(temperature=0)).token_ids == new


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("copied", [0, 1, 17, -1])
def test_an_update_that_was_interrupted_is_finished_before_anything_is_computed(dtype, copied, monkeypatch):
    """Oracle: an engine of the new weights."""
    config = tiny_config()
    old, new = (tiny_weights(config, torch.float32, seed) for seed in (0, 1))
    engine, fresh = (Engine(each, config=config, ring=RING, dtype=dtype) for each in (old, new))
    before = engine.generate(prompt(9), params(temperature=0)).token_ids
    read, names = StateDictCheckpoint.read, list(engine.model.destinations())

    def interrupted(checkpoint, name, out):
        read(checkpoint, name, out)
        left.remove(name)
        if len(left) == ending:
            raise KeyboardInterrupt

    left, ending = set(names), (len(names) - copied - 1) % len(names)
    monkeypatch.setattr(StateDictCheckpoint, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(new)
    monkeypatch.undo()
    assert len(left) == ending
    with pytest.raises(RingkvError, match="the tensors do not fit"):
        engine.update_weights({})
    for use in (
        lambda: engine.generate(prompt(9), params()),
        lambda: engine.generate([prompt(9), prompt(8)], params()),
        lambda: next(engine.stream(prompt(9), params())),
        lambda: engine.score(prompt(9)),
    ):
        with pytest.raises(RingkvError, match=r"^weights: an update was interrupted, .* accepted is another update$"):
            use()
    done = asyncio.run(engine.agenerate(prompt(9), params()))
    assert (done.finish_reason, done.error["type"], done.token_ids) == ("error", "RingkvError", [])
    engine.update_weights(new)
    now = engine.generate(prompt(9), params(temperature=0)).token_ids
    assert now == fresh.generate(prompt(9), params(temperature=0)).token_ids != before


def test_from_a_state_dict_and_its_config():
    config = tiny_config()
    engine = Engine(tiny_weights(config), config=config, ring=RING, dtype="float64")
    done = engine.generate(prompt(9), params(temperature=0))
    assert done.token_ids == tiny_engine().generate(prompt(9), params(temperature=0)).token_ids
    with pytest.raises(RingkvError, match="config: a state dict needs its config"):
        Engine(tiny_weights(config))


def test_engines_do_not_disturb_each_other_or_torch():
    state = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())
    one, two = tiny_engine(threads=1), tiny_engine(family="qwen3")
    stream = one.stream(prompt(5), params(seed=2))
    tokens = []
    for event in stream:
        tokens += event.token_ids
        assert torch.get_num_threads() == state[0]
        if len(tokens) == 3:
            two.generate(prompt(5), params(seed=2))
    assert tokens == tiny_engine().generate(prompt(5), params(seed=2)).token_ids
    assert (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed()) == state


def test_close_frees_everything():
    engine = tiny_engine()
    engine.generate(prompt(5), params(max_tokens=3))
    parts = [weakref.ref(part) for part in (engine.ring, engine.ring.k, engine.model, engine.model.embedding)]
    with engine:
        pass
    engine.close()
    gc.collect()
    assert [part() for part in parts] == [None] * 4
    with pytest.raises(RingkvError, match="it is closed"):
        engine.score(prompt(5))
    with pytest.raises(RingkvError, match="it is closed"):
        engine.generate(prompt(5))


def test_past_max_position_embeddings():
    """CASES R17: correct by the naive decoder, and one warning."""
    config = tiny_config(max_position_embeddings=64)
    engine = Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(40, 8, "streaming"))
    done = engine.generate(prompt(10), params(temperature=0, max_tokens=290))
    assert done.token_ids == Naive(config, tiny_weights(config)).run(prompt(10), 290, budget=40, window=8)[0]
    assert len(done.warnings) == 1
    assert "300 tokens" in done.warnings[0]
    assert "64" in done.warnings[0]
    assert engine.generate(prompt(10), params(max_tokens=54)).warnings == []


def test_texts_and_stop_strings_need_a_tokenizer():
    with pytest.raises(RingkvError, match="stop: this engine has no tokenizer"):
        tiny_engine().generate(prompt(3), params(stop="END"))
    with pytest.raises(
        RingkvError, match=r"^prompt: the model came without a tokenizer \(in a folder: tokenizer.json\)"
    ):
        tiny_engine().generate("Hi", raw=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ring": {"budget": 40}}, "ring = {'budget': 40}: accepted is a RingConfig"),
        ({"lanes": 0}, "lanes = 0"),
        ({"lanes": True}, "lanes = True"),
        ({"threads": 0}, "threads = 0"),
        ({"backend": "cuda"}, "backend = 'cuda'"),
        ({"seed": "x"}, "seed = 'x'"),
    ],
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(RingkvError) as error:
        tiny_engine(**options)
    assert message in str(error.value)
    assert "accepted" in str(error.value)
