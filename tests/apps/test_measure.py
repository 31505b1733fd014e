"""``ringkv bench`` and what it measures with: what is reported, not how fast this machine is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.apps.measure import bench as measure
from ringkv.apps.measure import peer
from ringkv.apps.measure.bench import Bench, Clock, decode, run_steps, seconds, speeds
from ringkv.cli import app
from ringkv.models.checkpoints.gguf import smollm2_path
from tiny import tiny_config, tiny_decoder, tiny_weights

CASES = [("--budgets", "many"), ("--lanes", "1,0"), ("--lanes", "auto"), ("--policies", "x"), ("--tokens", 0)]
CASES += [("--lanes", "1,99999999"), ("--policies", "tova;x"), ("--prompt", 10**12)]
CASES += [("--compare", "llama.cpp"), ("--policies", "full"), ("--budgets", "auto"), ("--budgets", ""), ("--prompt", 0)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def bench(*arguments):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_a_row_for_each_combination_and_json_last(tiny_checkpoint):
    options = ("--budgets", "40,60", "--lanes", "1,3", "--policies", "h2o,streaming", "--window", 8)
    code, out, err = bench(tiny_checkpoint("qwen3"), *options, "--tokens", 20, "--prompt", 41, "--dtype", "float32")
    assert (code, err) == (0, "")
    told = json.loads(out.splitlines()[-1])
    rows = told["rows"]
    wanted = {(b, n, p) for b in (40, 60) for n in (1, 3) for p in ("h2o", "streaming")}
    assert {(row["budget"], row["lanes"], row["policy"]) for row in rows} == wanted
    assert len(rows) == len(told["cards"]) == 8
    by = {(row["budget"], row["lanes"], row["policy"]): row for row in rows}
    assert by[40, 1, "h2o"]["evictions"] > 0 == by[60, 1, "h2o"]["evictions"]
    slot = 2 * 2 * 16 * 2 * 4  # layers, KV heads, head dim, K and V, float32
    assert by[60, 1, "h2o"]["step_bytes"] - by[40, 1, "h2o"]["step_bytes"] == (61 - 48) * slot
    for row in rows:
        assert row["floor_ms"] == pytest.approx(row["step_bytes"] / row["bandwidth_gb_s"] / 1e6)
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["late_ms"])
        assert row["achieved_gb_s"] == pytest.approx(row["step_bytes"] / row["late_ms"] / 1e6)
        assert row["tok_s"] > 0
        assert row["peak_bytes"] > row["held_bytes"]
    assert told["dtype"] == {"weights": "float32", "compute": "float32", "ring": "float32"}
    assert told["peers"] == []
    assert out.index("floor ms") < out.index("late ms") < out.index('"cards"')
    assert "peak" in out


@pytest.mark.parametrize("prompt, tokens", [(10, 5), (30, 30), (55, 12), (90, 9), (90, 3)])
def test_the_card_is_what_the_last_step_reads(tiny_checkpoint, prompt, tokens):
    rings = [RingConfig(40, 8, policy, "all") for policy in ("h2o", "streaming")]
    wanted = Bench([*rings, RingConfig(200, 8, "full")], [1, 2], prompt, tokens)
    with Engine.from_pretrained(tiny_checkpoint("llama"), dtype="float32") as engine:
        cards = wanted.cards(engine, 3e9)
        rows = [row for row, _ in wanted.rows(engine, 3e9)]
    assert [{name: row[name] for name in card} for row, card in zip(rows, cards, strict=True)] == cards


def test_the_cost_card_is_printed_before_anything_runs(tiny_checkpoint, monkeypatch, capsys):
    def told(*_):
        raise RingkvError(capsys.readouterr().out)

    monkeypatch.setattr(measure, "decode", told)
    arguments = ["bench", str(tiny_checkpoint("llama")), "--budgets", "40", "--window", "8", "--lanes", "3"]
    with pytest.raises(RingkvError, match=r"MB a step +copy GB/s +floor ms\s+vase-attnv +40 +3 "):
        app([*arguments, "--debug"], standalone_mode=False)


@pytest.mark.parametrize("option, value", CASES)
def test_what_is_not_accepted_is_one_line_and_code_2(tiny_checkpoint, option, value):
    code, out, err = bench(tiny_checkpoint("llama"), option, value)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_policies_with_fields_are_parted_by_semicolons(tiny_checkpoint):
    options = ("--budgets", 30, "--window", 4, "--lanes", 1, "--tokens", 2, "--prompt", 3)
    code, out, _ = bench(tiny_checkpoint("llama"), *options, "--policies", "rkv:lam=0.2,kernel=3; tova")
    assert code == 0
    assert [row["policy"] for row in json.loads(out.splitlines()[-1])["rows"]] == ["rkv", "tova"]


def test_the_peer_reads_the_same_tokens(tiny_checkpoint):
    options = ("--budgets", 40, "--window", 8, "--lanes", "1,2", "--tokens", 9, "--prompt", 5, "--dtype", "float32")
    code, out, err = bench(tiny_checkpoint("qwen3"), *options, "--compare", "transformers")
    assert (code, err) == (0, "")
    peers = json.loads(out.splitlines()[-1])["peers"]
    assert [(row["peer"], row["dtype"], row["lanes"]) for row in peers] == [
        ("transformers", "float32", n) for n in (1, 2)
    ]
    speed = {"prefill_tok_s", "first_token_ms", "early_ms", "late_ms", "tok_s"}
    assert all(set(row) == {"peer", "dtype", "lanes"} | speed and row["tok_s"] > 0 for row in peers)
    assert "transformers float32" in out


def test_the_peer_is_the_same_model(tiny_checkpoint):
    """Fed what the engine drew, it would draw the same: nothing is evicted, and both are float32."""
    drawn, prompt, folder = [], [3, 1, 4, 1, 5], tiny_checkpoint("qwen2")
    model = peer.load_peer(str(folder), CPU, torch.float32)
    model.register_forward_hook(lambda _, __, out: drawn.append(out.logits[:, -1].argmax(-1)))
    with Engine.from_pretrained(folder, ring=RingConfig(64, 8, "full"), dtype="float32", lanes=2) as engine:
        run = decode(engine, prompt, 12)
        (row,) = peer.compare(engine, model, prompt, {2: run})
    assert row["lanes"] == 2
    assert torch.stack(drawn[-13:], 1).tolist() == run.tokens


def test_the_peer_opens_a_gguf_too():
    model = peer.load_peer(str(smollm2_path()), CPU, torch.bfloat16)
    assert model.config.num_hidden_layers == 30
    assert model.dtype == torch.bfloat16


def test_a_peer_that_is_missing_or_fails_is_named(tiny_checkpoint, monkeypatch, tmp_path):
    options = ("--budgets", 40, "--window", 8, "--lanes", 1, "--tokens", 2, "--prompt", 3, "--compare", "transformers")
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    code, out, err = bench(tiny_checkpoint("llama"), *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "transformers is not installed: pip install" in err
    with pytest.raises(RingkvError, match="nowhere"):
        peer.load_peer(str(tmp_path / "nowhere"), CPU, torch.float32)
    broken = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 44}))
    with pytest.raises(RingkvError, match=r"compare: transformers cannot load .*broken: .+"):
        peer.load_peer(str(broken), CPU, torch.float32)


def test_steps_are_read_as_late_as_the_runner_has_them():
    class Late:
        latency, launched, read = 1, 0, 0

        def launch(self):
            assert self.launched - self.read <= 1
            self.launched += 1

        def collect(self):
            self.read += 1
            return type("Drawn", (), {"tokens": [self.read]})

    clock = Clock(CPU)
    assert run_steps(Late(), 5, clock) == [[1], [2], [3], [4], [5]]
    assert len(clock.between()) == 5
    assert run_steps(Late(), 0) == []


def test_a_clock_of_a_gpu_marks_the_stream_of_its_own_device(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            log.append(f"record on {stream}")

        def elapsed_time(self, other):
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"wait for {device}"))
    clock = Clock(torch.device("cuda", 1))
    clock.mark()
    clock.mark()
    assert clock.between() == [2.5]
    assert log == ["record on a stream of cuda:1"] * 2 + ["wait for cuda:1"]


def test_a_run_draws_what_the_engine_draws():
    config = tiny_config()
    with Engine(tiny_decoder(config, tiny_weights(config)), ring=RingConfig(24, 4, "tova"), lanes=3) as engine:
        run = decode(engine, [5, 6, 7], 40)
        params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True, on_repetition="ignore")
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == run.tokens[0] == run.tokens[2]
    assert (len(run.prefill_ms), len(run.step_ms)) == (3, 40)


def test_speeds_by_hand():
    told = speeds(50.0, 2.0, [1, 9, 2, 2, 3, 3, 4, 6], lanes=3)
    wanted = {"prefill_tok_s": 2000, "first_token_ms": 50, "early_ms": 5, "late_ms": 5, "tok_s": 800}
    assert told == wanted


def test_seconds_of_a_given_clock():
    ticks = iter((3.0, 10.0))
    assert seconds(lambda: None, lambda: next(ticks)) == 7


_PEAK = """
import torch
from ringkv.apps.measure.bench import peak_bytes, reset_peak
CPU = torch.device("cpu")
torch.ones(1 << 26)
before = peak_bytes(CPU)
reset_peak(CPU)
middle = peak_bytes(CPU)
block = torch.ones(1 << 25)
print(before, middle, peak_bytes(CPU), block.nbytes)
"""


def test_the_peak_begins_anew(tmp_path):
    """In a process of its own, since others may give memory back meanwhile. Its parent is larger."""
    large = torch.ones(1 << 27)
    told = subprocess.run([sys.executable, "-c", _PEAK], cwd=tmp_path, capture_output=True, text=True, check=True)
    before, middle, after, block = map(int, told.stdout.split())
    assert after < large.nbytes * 2
    assert middle + block * 0.5 < after <= before - 100e6  # what is resident changes beside the block, too
