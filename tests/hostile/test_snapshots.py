"""Files of snapshots from anywhere: refused in a line or gone on with, and never more memory than they say."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
from pathlib import Path

import psutil
import pytest
import torch

from bounded import run_bounded
from forged import put_together, take_apart
from ringkv import Engine, RingConfig, RingkvError, SamplingParams, Snapshot
from ringkv.apps.state.terminal import show_state
from ringkv.files import beside
from tiny import tiny_config, tiny_decoder, tiny_weights

CONFIG = tiny_config(layers=2)
WEIGHTS = tiny_weights(CONFIG, torch.float32)
PARAMS = SamplingParams(seed=3, temperature=1, max_tokens=41, ignore_eos=True)


def make_engine(policy="h2o", budget=24, window=8, sinks=4, lanes=1, weights=WEIGHTS, dtype=torch.float32, **options):
    decoder = tiny_decoder(CONFIG, {name: x.to(dtype) for name, x in weights.items()})
    ring = RingConfig(budget, window, policy, "all", sinks=sinks)
    return Engine(decoder, ring=ring, lanes=lanes, **options)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture
def file(engine, tmp_path):
    engine.generate(list(range(40)), PARAMS, keep=True).snapshot.save(tmp_path / "a.thought")
    return tmp_path / "a.thought"


FUZZ = """
import random
from tiny import tiny_config, tiny_decoder, tiny_weights
from forged import forge, take_apart
config = tiny_config(layers=2)
ring = RingConfig(24, 8, "h2o", "all")
engine = Engine(tiny_decoder(config, tiny_weights(config, torch.float32)), ring=ring)
path, data = Path("f.thought"), Path("a.thought").read_bytes()
params = SamplingParams(seed=3, temperature=1, max_tokens=47, ignore_eos=True, on_repetition="ignore")
whole = engine.generate(list(range(40)), params).token_ids
for number in range(500):
    forge(data, path, lambda: take_apart(Path("a.thought")), random.Random(number))
    def case():
        done = engine.generate(engine.load(path), params)
        same = "whole" if done.token_ids == whole else "other" if done.error is None else "error"
        return f"{same} {done.ring['kept']}"
    tried(number, case)
tried("after", lambda: engine.generate(list(range(40)), params).token_ids == whole)
"""


def test_500_forged_files(file, tmp_path):
    """The checksum of most is right. Oracle of a file that is accepted: tokens of the uninterrupted run, or of a lane
    that a ring could have; the engine is whole afterwards."""
    outcomes = run_bounded(FUZZ, tmp_path, seconds=120, memory=1 << 29)
    assert outcomes.pop("after") is True
    kinds = [outcome.split(":")[0].split(" ")[0] for outcome in outcomes.values()]
    assert len(kinds) == 500
    assert {*kinds} <= {"RingkvError", "whole", "other", "error"}
    assert kinds.count("RingkvError") > 250
    named = [each for each in outcomes.values() if each.startswith("RingkvError")]
    assert all("\n" not in each for each in named)
    about = ("snapshot ", "max_tokens", "stop", "append", "prompt: the model came without a tokenizer")
    assert [each for each in named if not each.removeprefix("RingkvError: ").startswith(about)] == []


def edited(change):
    def edit(path):
        about, tensors = take_apart(path)
        head = change(about, tensors)
        head = head if isinstance(head, dict) else {}
        put_together(path, about, tensors, **head)

    return edit


def replaced(make):
    def edit(path):
        path.unlink()
        make(path)

    return edit


def set_in(name, where, value):
    def change(about, tensors):
        tensors[name][where] = value

    return edited(change)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (replaced(os.mkfifo), "it is no regular file; accepted is"),
        (replaced(os.mkdir), "it is no regular file; accepted is"),
        (lambda path: path.write_bytes(b""), "it is no snapshot of ringkv: a header of 0 bytes"),
        (lambda path: path.write_text("hello, this is a text"), "it is no snapshot of ringkv: a header of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "it is no whole snapshot"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9] + b"123456789"), "crc32: the file is damaged"),
        (edited(lambda about, tensors: {"format": "pt"}), "format = 'pt': accepted is 'ringkv snapshot'"),
        (edited(lambda about, tensors: about.update(version=2)), "version = 2: accepted is 1"),
        (edited(lambda about, tensors: about.update(seed="7")), "seed = '7': accepted is of the type int"),
        (edited(lambda about, tensors: about["params"].update(top_p=7)), "top_p = 7: accepted is a number from 0 to 1"),
        (edited(lambda about, tensors: about["params"].update(x=7)), "params: x is not known"),
        (edited(lambda about, tensors: about["about"].update(digest="0")), "model digest is '0', and this engine's is"),
        (
            edited(lambda about, tensors: about["about"].update(budget=5, dtype=7)),
            "budget is 5, and this engine's is 24",
        ),
        (edited(lambda about, tensors: tensors.pop("order")), "tensor order is missing"),
        (edited(lambda about, tensors: tensors.update(x=torch.ones(2))), "tensor x is unknown"),
        (set_in("order", (0, 0, 0), 99), "order is not a permutation of the slots"),
        (set_in("host.counts", (), 32), "the host's counts differ from the device's"),
        (set_in("seen", (), 99), "seen is 99, and the header and the ids say 80"),
        (set_in("next_token", (), 5000), "next_token is 5000"),
        (set_in("steering.cursor", (), 300), "steering.cursor"),
        (set_in("v_range", (0, 0, 0), torch.nan), "a table holds NaN or infinity"),
        (set_in("ids.tokens", 3, 97), "ids.tokens holds 97; accepted are 0 to 96"),
        (set_in("ids.prompt", 3, -1), "ids.prompt holds -1; accepted are 0 to 96"),
    ],
)
def test_a_file_that_is_not_right_is_named(engine, file, edit, message):
    edit(file)
    with pytest.raises(RingkvError) as error:
        engine.resume(file)
    assert message in str(error.value)
    assert str(error.value).count(str(file)) == 1
    assert "\n" not in str(error.value)
    show_state_or_refuse(file)


def show_state_or_refuse(file):
    with contextlib.suppress(RingkvError):
        show_state(file, json=False)


def test_a_number_is_no_path(engine):
    """It would be the descriptor of an open file, which would be closed."""
    with pytest.raises(RingkvError, match="it is no whole snapshot"):
        engine.resume(0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "streaming"}, "policy is 'h2o', and this engine's is 'streaming'"),
        ({"budget": 25}, "budget is 24, and this engine's is 25"),
        ({"window": 7}, "window is 8, and this engine's is 7"),
        ({"sinks": 2}, "sinks is 4, and this engine's is 2"),
        ({"dtype": torch.bfloat16}, "model digest|kv dtype is float32, and this engine's is bfloat16"),
        ({"weights": {**WEIGHTS, "model.norm.weight": WEIGHTS["model.norm.weight"] * 1.1}}, "model digest"),
    ],
)
def test_another_engine_refuses_it_by_name(file, options, message):
    with pytest.raises(RingkvError, match=rf"^snapshot '.*': ({message})"):
        make_engine(**options).resume(file)


def test_what_fits_exactly_is_gone_on_with_and_said():
    """Another number of lanes, another backend, a wider type."""
    coarse = {name: x.to(torch.bfloat16).float() for name, x in WEIGHTS.items()}
    snapshot = make_engine(weights=coarse, backend="torch").generate([1, 2, 3], PARAMS, keep=True).snapshot
    more = PARAMS.replace(max_tokens=60)
    for options, said in (
        ({"lanes": 3, "backend": "torch"}, ["lanes 1 is now 3"]),
        (
            {"backend": "torch", "dtype": torch.float64},
            ["dtype ['float32', 'float32'] is now", "kv_dtype 'float32' is"],
        ),
    ):
        done = make_engine(weights=coarse, **options).generate(snapshot, more)
        (warning,) = [each for each in done.warnings if each.startswith("resumed elsewhere: ")]
        assert all(each in warning for each in said)
        assert done.token_ids[:41] == snapshot.tokens
        assert len(done.token_ids) == 60


def test_sizes_are_compared_before_anything_is_read(engine, file):
    """A file of 1 GiB that is all hole, and says so itself: it is refused at once."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    grown = 1 << 30
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    start = header[last]["data_offsets"][0]
    width = (header[last]["data_offsets"][1] - start) // max(1, torch.Size(header[last]["shape"]).numel())
    header[last] |= {"shape": [grown // width], "data_offsets": [start, start + grown]}
    head = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        out.truncate(8 + len(head) + start + grown)
    before = psutil.Process().memory_info().rss
    with pytest.raises(RingkvError, match=rf"tensor {last} is \[\d+\]; accepted is"):
        engine.resume(file)
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_a_thousand_forks_leave_nothing(engine):
    """Resumed and dropped in any order: the ring's bytes and the memory stay, no lane is kept."""
    half = engine.generate([1, 2, 3], PARAMS, keep=True).snapshot
    process, held, ring_bytes = psutil.Process(os.getpid()), [], engine.ring.nbytes
    kept = []
    for turn in range(1000):
        fork = half.fork(3)[turn % 3]
        stream = engine.resume(fork, PARAMS.replace(max_tokens=60), keep=turn % 2 == 0)
        event = next(stream)
        if turn % 5 == 0:
            *_, event = stream
            kept = [*kept[-3:], event.completion.snapshot][:: -1 if turn % 2 else 1]
        stream.close()
        if turn % 100 == 99:
            gc.collect()
            held.append(process.memory_info().rss)
    assert engine.ring.nbytes == ring_bytes
    assert engine.ring.running == []
    assert engine._serving.loop.running == {}
    assert held[-1] - held[1] < 2 << 20, held
    alive = [each for each in gc.get_objects() if type(each) is Snapshot]
    assert len(alive) <= 8


def test_a_disk_that_is_full_keeps_the_old_file(engine, file):
    snapshot, old = Snapshot.load(file), file.read_bytes()
    handler, before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    try:
        for path in (file, file.with_name("new.thought")):
            with pytest.raises(RingkvError, match=r"^snapshot = '.*thought': File too large$"):
                snapshot.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == old
    assert sorted(path.name for path in file.parent.iterdir()) == ["a.thought"]
    for path in (file / "b.thought", Path("/proc/b.thought"), Path("/dev/full")):
        with pytest.raises(RingkvError, match=r"^snapshot = '.*'"):
            snapshot.save(path)
    os.chmod(file, 0o644)
    snapshot.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == old
    assert not beside(file, ".tmp").exists()
