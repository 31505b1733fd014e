"""Callers that share an engine: streams that are half read, threads, tasks, and interrupts at any line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ringkv
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from tiny import tiny_config, tiny_decoder, tiny_weights

RING = RingConfig(40, 8)
ROOT = Path(ringkv.__file__).parent


def engine_of(ring=RING, **options):
    config = tiny_config()
    return Engine(tiny_decoder(config, tiny_weights(config)), ring=ring, **options)


def prompt(n, seed=0):
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def params(**values):
    return SamplingParams(**{"seed": 1, "max_tokens": 90, **values})


def alone(n, seed=0, ring=RING, **values):
    """The tokens of a request that has an engine to itself."""
    return engine_of(ring).generate(prompt(n, seed), params(**values)).token_ids


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_call_inside_a_stream_that_is_half_read(lanes):
    engine = engine_of(lanes=lanes)
    stream = engine.stream(prompt(5), params())
    begun = tokens_of(next(stream) for _ in range(3))
    assert engine.generate(prompt(7), params(max_tokens=30)).token_ids == alone(7, max_tokens=30)
    assert begun + tokens_of(stream) == alone(5)
    assert engine.ring.running == []


def test_a_score_inside_a_stream_waits_for_what_runs_only():
    engine = engine_of(lanes=1)
    first, second = (engine.stream(prompt(n), params(max_tokens=20)) for n in (5, 6))
    begun = tokens_of([next(first)])
    score = engine.score(prompt(30))
    assert torch.equal(score, engine_of().score(prompt(30)))
    assert begun + tokens_of(first) == alone(5, max_tokens=20)
    assert tokens_of(second) == alone(6, max_tokens=20)


def test_threads_share_the_lanes():
    """Oracle: each request alone. They join the batch: fewer steps run than one after another would take."""
    engine, results, steps = engine_of(lanes=4), {}, []
    launch = engine._runner.launch
    engine._runner.launch = lambda: (steps.append(list(engine.ring.running)), launch())[1]
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: engine.generate(prompt(n), params()).token_ids}))
        for n in range(5, 13)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {n: alone(n) for n in range(5, 13)}
    assert max(map(len, steps)) == 4
    assert engine.ring.running == []


def test_a_stream_may_be_taken_by_one_thread_after_another():
    """As a thread pool does that takes one event at a time."""
    engine = engine_of(lanes=2)
    stream, taken = engine.stream(prompt(5), params(max_tokens=12)), []
    while True:
        thread = threading.Thread(target=lambda: taken.append(next(stream, None)))
        thread.start()
        thread.join(60)
        if taken[-1] is None:
            break
    assert tokens_of(taken[:-1]) == alone(5, max_tokens=12)


def test_calls_are_served_in_turn():
    """A call of many prompts does not keep another waiting to its end, and is not kept waiting either."""
    engine = engine_of(lanes=1)
    read, prefill = [], engine._runner.prefill
    engine._runner.prefill = lambda lane, ids, *more: (read.append(len(ids)), prefill(lane, ids, *more))[1]
    many = engine.iterate([prompt(4, i) for i in range(20)], params(max_tokens=3))
    next(many)
    other = engine.iterate([prompt(9, i) for i in range(3)], params(max_tokens=3))
    assert len(list(other)) == 3
    assert len(list(many)) == 19
    assert sorted(read) == [4] * 20 + [9] * 3
    assert read.index(9) <= 2
    assert read[read.index(9) :][:5] == [9, 4, 9, 4, 9]


def test_prompts_are_taken_as_lanes_come_free():
    engine, taken = engine_of(lanes=2), []

    def prompts():
        for i in range(50):
            taken.append(i)
            yield prompt(4, i)

    run = engine.iterate(prompts(), params(max_tokens=3))
    _, done = next(run)
    assert done.completion_tokens == 3
    assert len(taken) <= 3
    rest = dict(run)
    assert taken == list(range(50))
    assert rest[49].token_ids == alone(4, 49, max_tokens=3)


def test_a_broken_iterator_of_prompts_is_the_callers_error():
    engine = engine_of(lanes=1)

    def prompts():
        yield prompt(4)
        raise ZeroDivisionError("mine")

    run = engine.iterate(prompts(), params(max_tokens=3))
    assert next(run)[0] == 0
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(run)
    assert engine.generate(prompt(4), params(max_tokens=3)).completion_tokens == 3
    with pytest.raises(RingkvError, match="params: 1 given for more prompts"):
        list(engine.iterate(iter([prompt(4)] * 2), [params(max_tokens=3)]))


def test_any_failure_of_a_row_is_its_own(monkeypatch):
    engine = engine_of(lanes=1)
    prepare = engine.prompts.prepare

    def broken(given, *more, **named):
        if len(given) == 5:
            raise RecursionError("too deep")
        return prepare(given, *more, **named)

    monkeypatch.setattr(engine.prompts, "prepare", broken)
    one, two, three = engine.generate([prompt(4), prompt(5), prompt(6)], params(max_tokens=3))
    assert two.error == {"type": "RecursionError", "message": "too deep"}
    assert (one.finish_reason, three.finish_reason) == ("length", "length")


def test_an_error_inside_the_with_block_is_the_callers():
    streams = []

    def use():
        with engine_of() as engine:
            streams.extend([engine.stream(prompt(5), params()), engine])
            next(streams[0])
            raise KeyError

    with pytest.raises(KeyError):
        use()
    stream, engine = streams
    assert list(stream)[-1].completion.finish_reason == "cancelled"
    with pytest.raises(RingkvError, match="it is closed"):
        next(engine.stream(prompt(5), params()))


def test_close_cancels_what_runs_in_another_thread():
    engine, results = engine_of(RingConfig(40, 8, "streaming"), lanes=1), []
    endless = params(max_tokens=10**6, ignore_eos=True, on_repetition="ignore")
    many = threading.Thread(target=lambda: results.append(engine.generate(prompt(5), endless)))
    many.start()
    while not engine.ring.running:
        time.sleep(0.01)
    began = time.monotonic()
    engine.close()
    many.join(60)
    assert not many.is_alive()
    assert time.monotonic() - began < 30
    assert results[0].finish_reason == "cancelled"


def test_what_had_no_lane_when_the_engine_closed_meets_an_error():
    engine = engine_of(lanes=1)
    many = engine.iterate([prompt(5)] * 3, params())
    one = engine.stream(prompt(5), params())
    next(one)
    engine.close()
    with pytest.raises(RingkvError, match="engine: it is closed"):
        list(many)
    assert list(one)[-1].completion.finish_reason == "cancelled"
    for use in (lambda: engine.score(prompt(5)), lambda: engine.generate(prompt(5)), lambda: engine.update_weights({})):
        with pytest.raises(RingkvError, match="engine: it is closed"):
            use()
    engine.close()


def test_a_cancel_before_the_first_event_counts():
    engine = engine_of()
    stream = engine.stream(prompt(5), params())
    engine.cancel(0)
    (event,) = stream
    assert event.completion.finish_reason == "cancelled"
    assert event.completion.token_ids == []
    assert engine.generate(prompt(5), params(max_tokens=3)).completion_tokens == 3


def test_a_stream_that_is_dropped_frees_its_lane():
    engine = engine_of(lanes=1)
    next(engine.stream(prompt(5), params()))
    gc.collect()
    assert engine.ring.running == []
    assert not engine.ring.active.any()


def test_a_call_from_within_a_step_is_refused():
    engine = engine_of()
    caught = []

    def again(done, layers):
        with pytest.raises(RingkvError, match="at work in this thread") as error:
            engine.generate(prompt(3))
        caught.append(error)

    list(engine.stream(prompt(5), params(max_tokens=3), on_prefill=again))
    assert len(caught) == 3


def test_an_error_of_on_prefill_is_its_callers():
    engine = engine_of(lanes=2)
    other = engine.stream(prompt(6), params(max_tokens=9))
    begun = tokens_of([next(other)])

    def broken(done, layers):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        list(engine.stream(prompt(5), params(), on_prefill=broken))
    assert begun + tokens_of(other) == alone(6, max_tokens=9)


def test_a_forked_child_is_told():
    engine = engine_of()
    engine.generate(prompt(3), params(max_tokens=2))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            engine.generate(prompt(3), params(max_tokens=2))
        except RingkvError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"made before this process was forked" in os.read(read, 999)


def test_tasks_share_the_lanes():
    """16 clients; one of them is cancelled, one closes its stream early. Oracle: each request alone."""
    engine, steps = engine_of(lanes=4), []
    launch = engine._runner.launch
    engine._runner.launch = lambda: (steps.append(len(engine.ring.running)), launch())[1]

    async def client(n):
        if n % 2:
            return (await engine.agenerate(prompt(n), params(max_tokens=30))).token_ids
        return [token async for event in engine.astream(prompt(n), params(max_tokens=30)) for token in event.token_ids]

    async def leaves():
        async with contextlib.aclosing(engine.astream(prompt(5), params())) as stream:
            async for _ in stream:
                break

    async def all_of_them():
        endless = asyncio.ensure_future(engine.agenerate(prompt(4), params(max_tokens=10**5, ignore_eos=True)))
        clients = [asyncio.ensure_future(client(n)) for n in range(5, 19)]
        await asyncio.gather(leaves(), *clients)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return [each.result() for each in clients]

    assert asyncio.run(all_of_them()) == [alone(n, max_tokens=30) for n in range(5, 19)]
    assert max(steps) == 4
    deadline = time.monotonic() + 60
    while engine.ring.running or engine._serving._pump is not None:
        assert time.monotonic() < deadline, "the lanes of tasks that left come free, and the thread ends"
        time.sleep(0.01)
    assert engine.generate(prompt(5), params()).token_ids == alone(5)


def test_tasks_beyond_the_queue_wait_and_are_served(monkeypatch):
    monkeypatch.setattr("ringkv.engine.serving.ASYNC_QUEUE", 1)
    engine, most = engine_of(lanes=1), []
    register = engine._serving.register

    def counting(call):
        most.append(len([each for each in engine._serving._calls.values() if not each.ended]) + 1)
        return register(call)

    engine._serving.register = counting

    async def client(n):
        return (await engine.agenerate(prompt(n), params(max_tokens=5))).token_ids

    async def all_of_them():
        return await asyncio.gather(*(client(n) for n in range(5, 13)))

    assert asyncio.run(all_of_them()) == [alone(n, max_tokens=5) for n in range(5, 13)]
    assert max(most) <= 2


def test_an_error_in_a_step_reaches_every_task():
    engine = engine_of(lanes=2)

    async def both():
        streams = [engine.astream(prompt(n), params(max_tokens=40)) for n in (5, 6)]
        for stream in streams:
            await anext(stream)
        monkey = engine._runner.launch
        engine._runner.launch = lambda: 1 / 0
        ends = []
        for stream in streams:
            async for event in stream:
                done = event.completion
            ends.append(done)
        engine._runner.launch = monkey
        return ends, (await engine.agenerate(prompt(5), params(max_tokens=4))).token_ids

    ends, after = asyncio.run(both())
    assert [done.error["type"] for done in ends] == ["ZeroDivisionError"] * 2
    assert after == alone(5, max_tokens=4)


class Struck(BaseException):
    """What a signal handler might raise."""


@pytest.mark.parametrize(
    "policy, backend, samples",
    [("h2o", "torch", 3), ("vase-attnv", "native", 1)],
)
def test_an_exception_at_any_line_leaves_the_engine_whole(policy, backend, samples, compiled):
    """Whatever line of ours it strikes: the next request gives the tokens that it gives alone."""
    config = tiny_config(layers=1)
    decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
    engine = Engine(decoder, ring=RingConfig(12, 3, policy, sinks=2), lanes=2, backend=backend)
    given, asked = prompt(14), params(max_tokens=5, n=samples, temperature=1.0)

    def run():
        done = engine.generate(given, asked)
        return [one.token_ids for one in (done if isinstance(done, list) else [done])]

    wanted = run()
    lines: set[tuple[str, int]] = set()
    struck: set[tuple[str, int]] = set()
    target: list[tuple[str, int] | None] = [None]

    def trace(frame, kind, argument):
        if not frame.f_code.co_filename.startswith(str(ROOT)) or "tests" in frame.f_code.co_filename:
            return None
        if kind == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            lines.add(place)
            if place == target[0]:
                target[0] = None
                struck.add(place)
                raise Struck
        return trace

    def traced():
        sys.settrace(trace)
        try:
            return run()
        finally:
            sys.settrace(None)

    assert traced() == wanted
    assert len(lines) > 300
    for number, place in enumerate(sorted(lines)):
        target[0] = place
        with contextlib.suppress(Struck):
            traced()
        target[0] = None
        if number % 6 == 5:  # the strikes before it heal nothing: each leaves the engine to the next request
            assert run() == wanted, sorted(lines)[number - 5 : number + 1]
    assert run() == wanted
    assert len(struck) > 0.9 * len(lines)
