"""A captured step, with an eager stand-in for the graph: the eager completions, and no read on the host."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernel_checks import NoReads
from ringkv import Engine, RingConfig, SamplingParams
from ringkv.engine import graph
from ringkv.engine.graph import GraphRunner
from ringkv.engine.ring.evict import evict_due
from ringkv.engine.ring.integrity import check_integrity
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.engine.sampling.values import Sampling
from ringkv.errors import RingkvError
from ringkv.kernels.backend import use
from ringkv.models.decoder import Decoder
from tiny import tiny_config, tiny_decoder, tiny_weights

CPU, META = torch.device("cpu"), torch.device("meta")
TAGS = (5, 6)


def eager_graph(step):
    """Like a graph: it writes the same tensors each time, so what was not copied away in time is lost."""
    outputs = [each.clone() for each in step()]

    def replay():
        for output, new in zip(outputs, step(), strict=True):
            output.copy_(new)
        return outputs

    return replay


def engines(policy, lanes=3, retention="refreekv"):
    """The same engine with an eager runner, and with a captured one."""
    config = tiny_config("qwen3", layers=2)
    weights = tiny_weights(config, torch.float32)
    for captured in (False, True):
        ring = RingConfig(40, 8, policy, retention)
        # A graph holds the operations of torch, or kernels of a GPU; NoReads sees nothing of what C does.
        engine = Engine(tiny_decoder(config, weights), ring=ring, lanes=lanes, backend="torch")
        parts = engine.model, engine.ring
        steering = Steering(lanes, TAGS, CPU)
        if captured:
            engine._runner = GraphRunner(*parts, Sampler(lanes, 97, CPU, static=True), steering, eager_graph)
        else:
            engine._runner = Runner(*parts, Sampler(lanes, 97, CPU), steering)
        engine._serving.loop.runner = engine._runner
        yield engine


def without_times(done):
    return {name: value for name, value in dataclasses.asdict(done).items() if name != "timing"}


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_completions_are_the_eager_runners(policy):
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (3, 60, 17, 1, 90, 30, 12)]
    params = [
        SamplingParams(temperature=0, max_tokens=120),
        SamplingParams(temperature=1, top_k=20, top_p=0.9, seed=1, max_tokens=60, logprobs=3),
        SamplingParams(temperature=2, min_p=0.05, seed=2, max_tokens=1),
        SamplingParams(temperature=1, top_p=1, seed=3, max_tokens=90, repetition_penalty=1.3, presence_penalty=0.4),
        SamplingParams(temperature=1.5, seed=4, max_tokens=200, stop_token_ids=[11, 12, 13], min_tokens=40),
        SamplingParams(temperature=1, seed=5, max_tokens=2, logit_bias={7: 100}),
        SamplingParams(temperature=0.7, seed=6, max_tokens=150, n=2),
    ]
    eager, captured = (engine.generate(prompts, params) for engine in engines(policy))
    assert [without_times(done) for done in eager] == [without_times(done) for done in captured]
    assert max(done.ring["evictions"] for done in captured) > 10
    assert captured[3].finish_reason == "length"


def test_a_row_that_is_not_finite_ends_its_request_alone():
    results = []
    for engine in engines("streaming"):
        engine.model.embedding[96] = torch.nan
        params = [SamplingParams(temperature=0, max_tokens=40, logit_bias=bias) for bias in (None, {96: 1000}, None)]
        results.append([without_times(done) for done in engine.generate([[1, 2], [3, 4], [5, 6]], params)])
    assert results[0] == results[1]
    assert [done["finish_reason"] for done in results[0]] == ["length", "error", "length"]


@pytest.mark.parametrize("policy", ["vase-attnv", "streaming"])
def test_cancel_and_a_second_call_leave_no_trace(policy):
    first, second = ([1, 2, 3], SamplingParams(seed=1, max_tokens=60)), ([4, 5], SamplingParams(seed=2, max_tokens=60))
    for engine in engines(policy, lanes=1):
        wanted = [without_times(engine.generate(*each)) for each in (first, second)]
        stream = engine.stream(*first)
        for _ in range(20):
            next(stream)
        stream.close()
        assert [without_times(engine.generate(*each)) for each in (second, first)] == wanted[::-1]


def test_a_capture_warms_up_and_records_on_one_side_stream(monkeypatch):
    """With stand-ins for CUDA: what runs when, and on which stream."""
    log, current = [], ["main"]

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream):
        current.append(stream.name)
        yield
        current.pop()

    @contextmanager
    def recording(made, stream, capture_error_mode):
        log.append("record")
        with on(stream):
            yield
        log.append("recorded")

    def step():
        log.append(f"step on {current[-1]}")
        return torch.zeros(1), None, torch.zeros(1)

    side, main = Stream("side"), Stream("main")
    monkeypatch.setattr(graph, "_own_stream", lambda: side)
    cuda = {"current_device": lambda: 0, "current_stream": lambda: main, "stream": on, "graph": recording}
    replays = SimpleNamespace(replay=lambda: log.append("replay"))
    for name, fake in (cuda | {"CUDAGraph": lambda: replays}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    replay = graph.capture(step)
    warm = ["side waits for main", *["step on side"] * 3, "main waits for side"]
    assert log == [*warm, "record", "step on side", "recorded"]
    assert replay() is replay()
    assert log[-2:] == ["replay", "replay"]


def test_no_two_graphs_share_a_stream(monkeypatch):
    """With stand-ins for CUDA that hand out four streams in turn, as torch does 32."""

    class Stream:
        made = 0

        def __init__(self):
            Stream.made += 1
            self.handle = Stream.made % 4

        def __eq__(self, other):
            return self.handle == other.handle

        def __hash__(self):
            return self.handle

        def wait_stream(self, other):
            pass

    @contextmanager
    def nothing(*args, **kwargs):
        yield

    monkeypatch.setattr(graph, "_captured_on", weakref.WeakSet())
    for name, fake in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nothing,
        "graph": nothing,
        "CUDAGraph": SimpleNamespace,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def captured():
        return graph.capture(lambda: (torch.zeros(1), None, torch.zeros(1)))

    kept = [captured(), captured()]
    for _ in range(10):
        kept.append(captured())
        assert len({stream.handle for stream in graph._captured_on}) == 3
        kept.pop()
    kept += [captured(), captured()]
    with pytest.raises(RingkvError, match="every stream of this GPU"):
        captured()
    kept.pop()
    captured()


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o", "triattention", "full"])
def test_warming_up_leaves_the_ring_as_it_was(policy):
    config = tiny_config("qwen3")
    decoder, ring = (
        tiny_decoder(config, tiny_weights(config, torch.float32)),
        Ring(config, RingConfig(40, 8, policy), 2, CPU, torch.float32),
    )
    before = {name: tensor.clone() for name, tensor in ring.tensors().items()}
    with use("torch"):
        GraphRunner(decoder, ring, Sampler(2, 97, CPU, static=True), Steering(2, TAGS, CPU), eager_graph)
    for name, tensor in ring.tensors().items():
        assert name == "next_token" or torch.equal(tensor, before[name]), name  # an idle lane draws -1
    check_integrity(ring)
    for mirror in (ring.counts, ring.spans, ring.evicted, ring.unobserved):
        assert (mirror == 0).all()


def test_a_slow_start_says_what_it_does(monkeypatch, caplog):
    config, heard = tiny_config("qwen3"), threading.Event()

    class Listening(logging.Handler):
        def emit(self, record):
            heard.set()

    def slow(step):
        assert heard.wait(60), "a start that takes long is explained while it lasts"
        return step

    def quick(step):
        monkeypatch.setattr(graph, "SLOW", 1e6)
        return step

    handler = Listening()
    graph.log.addHandler(handler)
    try:
        for captured, delay in ((slow, 0.0), (quick, 1e6)):
            caplog.clear()
            monkeypatch.setattr(graph, "SLOW", delay)
            ring = Ring(config, RingConfig(40, 8, "streaming"), 1, CPU, torch.float32)
            with use("torch"):
                GraphRunner(
                    tiny_decoder(config, tiny_weights(config, torch.float32)),
                    ring,
                    Sampler(1, 97, CPU, static=True),
                    Steering(1, TAGS, CPU),
                    captured,
                )
            assert [record.getMessage() for record in caplog.records] == [graph.COMPILING] * (captured is slow)
    finally:
        graph.log.removeHandler(handler)


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_what_is_put_into_a_lane_leaves_the_others_as_they_are(policy):
    """While a lane reads tokens one by one, the others stand still. Oracle: each request alone."""
    params = [SamplingParams(seed=1, max_tokens=80, repetition_penalty=1.5, presence_penalty=1), SamplingParams(seed=2)]
    params[1] = params[1].replace(max_tokens=60, repetition_penalty=1.5)
    results = []
    for engine in engines(policy):
        head = engine.read([1, 2, 3], params[1])
        more = head.then([7, 8, 9, 10, 11])
        alone = [engine.generate([4, 5], params[0]), engine.generate(more, params[1])]
        stream = engine.stream([4, 5], params[0])
        events = [next(stream) for _ in range(20)]
        beside = engine.generate(more, params[1])
        done = [*events, *stream][-1].completion
        assert [without_times(each) for each in (done, beside)] == [without_times(each) for each in alone]
        results.append([without_times(each) for each in alone])
    assert results[0] == results[1]


@pytest.mark.parametrize("policy", ["vase-attnv", "h2o"])
def test_scores_come_from_the_captured_step(policy):
    ids = torch.randint(97, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    eager, captured = engines(policy, lanes=2)
    replays = []
    replay = captured._runner._replay
    captured._runner._replay = lambda: (replays.append(1), replay())[1]
    assert torch.equal(captured.score(ids, seeds=[1, 2, 3]), eager.score(ids, seeds=[1, 2, 3]))
    assert len(replays) == 2 * 148
    for engine in (eager, captured):
        engine.model.embedding[ids[20]] = torch.nan
    scores = [engine.score(ids[:40], seeds=[1]) for engine in (eager, captured)]
    assert torch.equal(scores[0].isnan(), scores[1].isnan())
    assert scores[0].isnan().any()


def test_a_static_sampler_never_moves_its_tensors():
    sampler = Sampler(2, 97, CPU, static=True)

    def places():
        return {name: value.data_ptr() for name, value in vars(sampler).items() if isinstance(value, torch.Tensor)}

    before = places()
    assert len(before) == 12
    every = SamplingParams(
        temperature=1, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2, presence_penalty=1, min_tokens=2,
        logit_bias={1: 2},
    )  # fmt: skip
    for params in (every, SamplingParams(temperature=0)):
        sampler.set(1, Sampling.resolve(params, {}), [1, 2], [3])
        assert places() == before


@pytest.mark.parametrize(
    "policy", ["vase-attnv", "vase-dkv", "rkv", "h2o", "tova", "gkv", "expected-attention", "triattention"]
)
def test_a_step_with_evictions_reads_nothing(policy):
    *_, engine = engines(policy, lanes=2)
    with use("torch"):
        check_reads(engine)


def check_reads(engine):
    runner, ring = engine._runner, engine.ring
    for lane in range(2):
        ring.reset(lane, seed=lane)
        runner.first(lane, runner.prefill(lane, [lane + 1, 2, 3]))
    with NoReads():
        for _ in range(2):
            runner.launch()
    for _ in range(60):
        runner.collect()
        with NoReads():
            runner.launch()
    assert ring.evicted.min() > 1
    check_integrity(ring)
    with pytest.raises(AssertionError, match="reads the device"), NoReads():
        ring.k[ring.position > 3]
    with pytest.raises(AssertionError, match="reads the device"), NoReads():
        bool(ring.seen[0] > 1)


@pytest.mark.parametrize(
    "policy", ["vase-attnv", "vase-dkv", "rkv", "h2o", "tova", "gkv", "expected-attention", "triattention"]
)
@pytest.mark.parametrize("static", [False, True])
def test_a_step_runs_on_the_meta_device_where_any_read_raises(static, policy):
    config = tiny_config("qwen3")
    ring = Ring(config, RingConfig(40, 8, policy), 2, META, torch.float32)
    sampler = Sampler(2, 97, META, static=static)
    runner = Runner(Decoder(config, META, torch.float32), ring, sampler, Steering(2, TAGS, META))
    for lane in range(2):
        ring.start(lane, 40)
    ring.counts[:] = 47
    with NoReads(), torch.inference_mode():
        token, forced, logits = runner.device_step()
        ring.follow()
        evict_due(ring)
    assert token.shape == forced.shape == (2,)
    assert logits.shape == (2, 97)
    assert (ring.evicted == 1).all()
    with pytest.raises((RuntimeError, NotImplementedError)):
        token.tolist()
    with pytest.raises(AssertionError, match="waits for the device"), NoReads():
        torch.zeros(2).to(META)
