"""What is read before a snapshot is gone on with. Oracles: tokens fed by hand; the template's own conversation."""

from __future__ import annotations

import pytest
import torch

from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from scripted import byte_tokenizer
from tiny import tiny_config, tiny_decoder, tiny_weights

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_ids[0]
CONFIG = tiny_config(vocab_size=TOKENIZER.size, layers=2)
WEIGHTS = tiny_weights(CONFIG, torch.float32)
PARAMS = SamplingParams(temperature=0, seed=3, max_tokens=40, on_repetition="ignore", ignore_eos=True)
USER, ANSWER, NEXT = (
    {"role": role, "content": text}
    for role, text in (("user", "What is it?"), ("assistant", "x"), ("user", "And <|im_end|> then?"))
)


def make_engine(lanes=2, policy="vase-attnv"):
    ring = RingConfig(24, 8, policy, "all")
    return Engine(tiny_decoder(CONFIG, WEIGHTS), TOKENIZER, ring=ring, lanes=lanes)


def by_hand(engine, prompt, tokens, count):
    """The greedy tokens that follow a prompt and tokens that are fed one by one."""
    with engine.alone() as runner:
        runner.ring.reset(0, seed=3)
        runner.prefill(0, prompt)
        found = list(tokens)
        for _ in range(count):
            while runner.ring.seen[0] < len(prompt) + len(found):
                token = found[int(runner.ring.seen[0]) - len(prompt)]
                logits = runner.forward(torch.full((engine.lanes,), token))
            found.append(int(logits[0].argmax()))
    return found[len(tokens) :]


def resumed(engine, snapshot, params=None, append=None):
    *_, last = engine.resume(snapshot, params, append, keep=True)
    return last.completion


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_tokens_that_are_put_in(policy):
    """While another lane runs, which they do not touch; as a text, as ids, and of a prompt that was only read."""
    engine = make_engine(policy=policy)
    prompt = TOKENIZER.encode("It was a dark and stormy night, and then")
    alone = engine.generate([5, 6, 7], PARAMS.replace(seed=9)).token_ids
    half = engine.generate(prompt, PARAMS.replace(max_tokens=11), keep=True).snapshot
    more = TOKENIZER.encode(" Wait, <think>", control=False)
    wanted = by_hand(engine, prompt, half.tokens + more, 12)
    neighbour = engine.stream([5, 6, 7], PARAMS.replace(seed=9))
    first = next(neighbour)
    params = PARAMS.replace(max_tokens=11 + len(more) + 12)
    for append in (" Wait, <think>", more):
        done = resumed(engine, half, params, append)
        assert done.token_ids == half.tokens + more + wanted
        assert done.completion_tokens == len(done.token_ids)
        assert done.text == TOKENIZER.decode(done.token_ids)
        assert done.snapshot.forced == [*range(11, 11 + len(more))]
    assert first.token_ids + [id for event in neighbour for id in event.token_ids] == alone
    begun = resumed(engine, engine.read(prompt, PARAMS).then(more), params)
    assert begun.token_ids[: len(more)] == more
    assert begun.token_ids[len(more) : len(more) + 12] == by_hand(engine, prompt, more, 12)
    again = engine.read(half.then(more), params)  # it is read, and gone on with later
    assert again.tokens == half.tokens + more
    assert resumed(engine, again, params).token_ids == half.tokens + more + wanted
    # Half of what followed goes on too: what was put in is part of the past.
    part = resumed(engine, half, params.replace(max_tokens=11 + len(more) + 5), more).snapshot
    assert resumed(engine, part, params).token_ids == half.tokens + more + wanted


def test_what_ended_an_answer_gives_way_to_a_text():
    engine = make_engine()
    whole = engine.generate("Hi", PARAMS.replace(max_tokens=20))
    stop = whole.token_ids[9]
    at = whole.token_ids.index(stop)
    params = PARAMS.replace(stop_token_ids=[stop])
    ended = engine.generate("Hi", params, keep=True)
    assert ended.finish_reason == "stop"
    assert resumed(engine, ended.snapshot).token_ids == ended.token_ids  # it stays as it is
    more = TOKENIZER.encode(" Wait")
    done = resumed(engine, ended.snapshot, params, " Wait")
    assert done.token_ids[: at + len(more)] == whole.token_ids[:at] + more
    past = resumed(engine, ended.snapshot, params, "")  # past it, if nothing is put in its place
    assert past.token_ids[: at + 2] == whole.token_ids[: at + 2]
    again = resumed(engine, past.snapshot)
    assert (again.token_ids, again.text) == (past.token_ids, past.text)


def test_a_stop_string_is_gone_past():
    engine = make_engine()
    whole = engine.generate("Hi", PARAMS)
    params = PARAMS.replace(stop=[whole.text[12:14]])
    ended = engine.generate("Hi", params, keep=True)
    assert ended.stop_reason == params.stop[0]
    with pytest.raises(RingkvError, match=r"max_tokens = \d+: accepted is more than"):
        resumed(engine, ended.snapshot, params.replace(max_tokens=len(ended.token_ids)), "")
    free = resumed(engine, ended.snapshot, params.replace(stop=[]), "")
    assert free.token_ids == whole.token_ids
    done = resumed(engine, ended.snapshot, params, "")
    assert len(done.token_ids) > len(ended.token_ids)
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]


def test_params_that_the_text_does_not_allow_are_an_error_of_the_result():
    engine = make_engine()
    half = engine.generate("Hi", PARAMS.replace(max_tokens=20), keep=True)
    done = resumed(engine, half.snapshot, PARAMS.replace(stop=[half.text[3:5]]))
    assert done.finish_reason == "error"
    assert "the answer of the snapshot would have ended by stop after" in done.error["message"]
    assert done.snapshot is None


def test_a_turn_follows_an_answer():
    """The prompt is what the template writes for the whole conversation, in which no message forges a control token."""
    engine = make_engine()
    half = engine.generate([USER], PARAMS.replace(max_tokens=6), keep=True).snapshot
    said = half.tokens
    done = resumed(engine, half, PARAMS, [NEXT])
    wanted = engine.prompts.encode([USER, ANSWER, NEXT])
    at = wanted.index(EOS, wanted.index(EOS) + 1) - 1  # where the dummy answer stands
    wanted = [*wanted[:at], *said, *wanted[at + 1 :]]
    assert done.snapshot.prompt == wanted
    assert done.prompt_tokens == len(wanted)
    assert done.token_ids == by_hand(engine, half.prompt, wanted[len(half.prompt) :], 40)
    ended = engine.generate([USER], PARAMS.replace(max_tokens=6, logit_bias={EOS: 1000}, ignore_eos=False), keep=True)
    assert ended.token_ids == [EOS]
    turn = resumed(engine, ended.snapshot, PARAMS, [NEXT]).snapshot.prompt
    assert turn == [*wanted[:at], *wanted[at + len(said) :]]  # its end is not written twice


@pytest.mark.parametrize("head", [[{"role": "system", "content": "Be kind."}], [USER, ANSWER]])
def test_a_head_is_read_once(head):
    engine = make_engine()
    read = engine.read(head)
    assert read.tail == head[-1]["role"]
    for messages in ([USER], [{"role": "user", "content": "Another one?"}]):
        done = engine.generate(read.then(messages), PARAMS, keep=True)
        assert done.snapshot.prompt == engine.prompts.encode([*head, *messages])
    both = engine.generate([read.then([USER]), read.then([NEXT])], PARAMS)
    assert [each.error for each in both] == [None, None]
    for append in (None, "text"):
        with pytest.raises(RingkvError, match=f"append: it ends with the {head[-1]['role']} message"):
            engine.resume(read, PARAMS, append)


def test_logprobs_stay_at_the_places_of_their_tokens():
    """Of an answer, and of a prompt that was only read. Oracle: the ids of the answer, and the greedy choice."""
    engine = make_engine()
    params = PARAMS.replace(logprobs=1)
    for start in (engine.generate("Hi", params.replace(max_tokens=6), keep=True).snapshot, engine.read("Hi", PARAMS)):
        at = len(start.tokens)
        first = resumed(engine, start, params.replace(max_tokens=12), "abc")
        done = resumed(engine, first.snapshot, params.replace(max_tokens=20), "de")
        assert [each["id"] for each in done.logprobs] == done.token_ids
        assert len(done.token_ids) == 20
        put = [*range(at, at + 3), 12, 13]
        assert [place for place, each in enumerate(done.logprobs) if each["logprob"] is None] == put
        for place, each in enumerate(done.logprobs):
            assert each["top"] == ([] if place in put else [[each["id"], each["logprob"]]])


def test_what_cannot_be_put_in_is_refused():
    engine = make_engine()
    half = engine.generate("Hi", PARAMS.replace(max_tokens=6), keep=True).snapshot
    for append, message in (
        ([10**9], "prompt: token id = 1000000000: accepted is 0 to"),
        ([{"role": "nobody", "content": "x"}], "messages"),
        (engine, "append"),
        (b"ab", "append = b'ab': accepted is a text, token ids or messages"),
    ):
        with pytest.raises(RingkvError, match=message):
            engine.resume(half, PARAMS, append)
    with pytest.raises(RingkvError, match="append: something is to be read already"):  # it would be lost
        engine.resume(half.then("a"), PARAMS, "b")
    with pytest.raises(RingkvError, match="append = '': accepted is a text"):
        engine.generate(engine.read("Hi", PARAMS).then(""), PARAMS)
