"""Which sampling values are in force, what ends a text, and which ids may be drawn: CASES E1, E5, E6."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.values import DEFAULTS, Sampling
from ringkv.kernels.philox import TOKEN, to_uniform
from ringkv.kernels.table import philox
from ringkv.models.tokenizer import Tokenizer
from rings import make_ring
from scripted import byte_tokenizer
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(40, 8, "streaming", "all")


def engine_of(generation_config=None, *, tokenizer=None, **changes):
    config = tiny_config(vocab_size=tokenizer.size + 40 if tokenizer else 97, layers=1, **changes)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    return Engine(decoder, tokenizer, ring=RING, generation_config=generation_config)


def test_defaults_of_the_checkpoint_and_the_user():
    theirs = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.1, "top_p": None, "max_length": 20}
    done = engine_of(theirs).generate([1, 2], SamplingParams(top_k=5, min_p=0.0, max_tokens=3, ignore_eos=True))
    wanted = {
        "temperature": (0.9, "generation_config"),
        "top_k": (5, "user"),
        "repetition_penalty": (1.1, "generation_config"),
        "top_p": (0.95, "default"),
        "min_p": (0.0, "user"),
        "presence_penalty": (0.0, "default"),
        "max_tokens": (3, "user"),
        "ignore_eos": (True, "user"),
        "stop": ((), "default"),
    }
    assert {name: (done.sampling[name]["value"], done.sampling[name]["source"]) for name in wanted} == wanted


def test_values_that_a_checkpoint_says_are_not_in_force():
    resolved = Sampling.resolve(SamplingParams(), {"do_sample": False, "temperature": 0.1, "top_k": 3})
    assert {name: resolved.values[name] for name in DEFAULTS} == DEFAULTS | {"temperature": 0}
    assert Sampling.resolve(SamplingParams(), {"do_sample": True, "temperature": 0.1}).values["temperature"] == 0.1


def test_a_value_of_the_checkpoint_that_cannot_be_is_refused_by_name():
    engine = engine_of({"temperature": -1})
    with pytest.raises(RingkvError, match=r"generation_config\.json: temperature = -1.*give temperature yourself"):
        engine.generate([1], SamplingParams(max_tokens=1))
    assert engine.generate([1], SamplingParams(max_tokens=1, temperature=1.0)).completion_tokens == 1


@pytest.mark.parametrize("in_config, in_generation", list(itertools.product([(), (7,), (7, 8)], [None, 9, [9, 10]])))
@pytest.mark.parametrize("in_tokenizer", [False, True])
def test_every_ending_token_that_is_named_anywhere_ends_the_text(in_config, in_generation, in_tokenizer):
    tokenizer = byte_tokenizer() if in_tokenizer else None
    engine = engine_of({"eos_token_id": in_generation}, tokenizer=tokenizer, eos_ids=in_config)
    named = {*in_config, *(in_generation if isinstance(in_generation, list) else [in_generation])} - {None}
    named |= set(tokenizer.eos_ids) if tokenizer else set()
    for token in {5, 7, 8, 9, 10, *named}:
        params = SamplingParams(temperature=0, logit_bias={token: 1e4}, max_tokens=3)
        done = engine.generate([1, 2], params)
        ended = token in named
        assert (done.finish_reason, done.completion_tokens) == (("stop", 1) if ended else ("length", 3))
        assert done.stop_reason == (token if ended else None)
        assert engine.generate([1, 2], params.replace(ignore_eos=True)).completion_tokens == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_ids_beyond_the_tokenizer_are_never_drawn(temperature):
    tokenizer = byte_tokenizer()
    engine = engine_of(tokenizer=tokenizer)
    vocabulary = engine.model.config.vocab_size
    assert vocabulary == tokenizer.size + 40
    # The padded rows of the head would win every draw.
    engine.model.head.weight[tokenizer.size :] *= 1000
    params = SamplingParams(temperature=temperature, top_p=1, seed=1, max_tokens=200, ignore_eos=True)
    done = engine.generate([1, 2], params.replace(on_repetition="ignore"))
    assert max(done.token_ids) < tokenizer.size
    assert len(done.token_ids) == 200


def with_holes():
    """Two of three ids below 60 are a token's; behind them an empty word, and a control token."""
    words = {chr(0x100 + id): id for id in range(60) if id % 3} | {"": 60, "<|im_end|>": 61}
    backend = tokenizers.Tokenizer(models.BPE(words, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"})


HOLES = {*range(0, 60, 3), 60}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("static", [False, True])
def test_ids_that_no_token_has_are_never_drawn(temperature, static, cpu_path):
    """What is drawn does not depend on their rows of the head, which would win every draw."""
    params = SamplingParams(temperature=temperature, top_p=1, seed=1, max_tokens=50, ignore_eos=True)
    biased = params.replace(on_repetition="ignore", logit_bias={1: 2.0})
    drawn = []
    for loud in (False, True):
        config = tiny_config(vocab_size=100, layers=1)
        decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
        engine = Engine(decoder, with_holes(), ring=RING, lanes=2, backend=cpu_path)
        if static:
            engine._runner.sampler = Sampler(2, engine.prompts.vocabulary, torch.device("cpu"), static=True)
            engine._runner.sampler.forbid(engine.prompts.holes)
        if loud:
            engine.model.head.weight[sorted(HOLES)] *= 1000
        done = engine.generate([[1, 2], [1, 4], [1, 5]], [biased, params.replace(on_repetition="ignore"), biased])
        drawn.append([each.token_ids for each in done])
    assert drawn[0] == drawn[1]
    every = {id for ids in drawn[0] for id in ids}
    assert not every & HOLES
    assert max(every) < 62
    assert len(every) > (25 if temperature else 0)


def test_what_no_token_has_cannot_be_asked_for():
    engine = engine_of(tokenizer=with_holes())
    for params in ({"logit_bias": {3: 1.0}}, {"stop_token_ids": [3]}):
        with pytest.raises(RingkvError, match=r": token id = 3: accepted is the id of a token; none has this one"):
            engine.generate([1], SamplingParams(**params))


def test_noise_is_that_of_its_position_whoever_runs_beside():
    """The request's key and the position alone give the noise of a draw, by Philox; lanes come and go meanwhile."""
    ring = make_ring("streaming", budget=16, window=4, lanes=3)
    sampler = Sampler(3, 1000, torch.device("cpu"))
    sampling = Sampling.resolve(SamplingParams(temperature=1, top_p=1), {})
    logits = torch.zeros(3, 1000)
    random = np.random.default_rng(0)

    def wanted(lane):
        seed, sample = ring.seed[lane, None], ring.sample[lane, None]
        u = to_uniform(philox(seed, ring.seen[lane, None], 0, 0, TOKEN + 256 * sample)[0])
        return int(u.double() * 1000)

    def admit(lane):
        ring.reset(lane, seed=int(random.integers(2**60)), sample=int(random.integers(5)))
        ring.start(lane, int(random.integers(1, 5000)))
        sampler.set(lane, sampling)
        return int(sampler.draw(logits[:1], ring, [lane])), wanted(lane)

    drawn = [admit(lane) for lane in range(3)]
    for step in range(400):
        ring.seen += ring.active
        tokens = sampler.draw(logits, ring).tolist()
        drawn += [(tokens[lane], wanted(lane)) for lane in ring.running]
        lane = int(random.integers(3))
        if step < 150:
            continue  # for a while the lanes only run
        if step % 23 == 0:
            ring.stop(lane)
        elif step % 29 == 1:
            drawn.append(admit(lane))
        elif step % 97 == 2:
            ring.reset(lane, seed=0)  # a prefill that is cancelled
    assert len(drawn) > 600
    assert [got for got, _ in drawn] == [each for _, each in drawn]


def test_a_greedy_lane_takes_the_lowest_of_ties_beside_one_that_draws():
    ring = make_ring("streaming", budget=16, window=4, lanes=2)
    sampler = Sampler(2, 50, torch.device("cpu"))
    for lane, temperature in enumerate((0, 1)):
        ring.reset(lane, seed=lane)
        sampler.set(lane, Sampling.resolve(SamplingParams(temperature=temperature, top_p=1), {}))
    greedy, other = sampler.draw(torch.zeros(2, 50), ring).tolist()
    assert greedy == 0
    assert other > 0


@pytest.mark.parametrize("value", [0, 1, "false", []])
def test_use_cache_of_a_checkpoint_is_true_or_false(value):
    with pytest.raises(
        RingkvError, match=r"generation_config\.json: use_cache = .*: accepted is true or false or null"
    ):
        Sampling.resolve(SamplingParams(), {"use_cache": value})
    for plain in (True, False, None):
        assert not Sampling.resolve(SamplingParams(), {"use_cache": plain}).warnings
