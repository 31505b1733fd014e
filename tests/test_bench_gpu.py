"""The GPU script, dry: the same code on a CPU, the same keys, and a byte model that is the engine's plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringkv.bench.gpu import apart, goals, here
from ringkv.bench.gpu_sections import SECTIONS
from ringkv.engine.config import RingConfig
from ringkv.engine.memory import Planner

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"
STATE = {"ms", "bytes", "floor_ms", "ratio"}
KEYS = {
    "kernels": {"seconds"},
    "graph": {"tokens", "evictions", "equal", "seconds"},
    "decode": {"bandwidth", "steps", "left_out", "seconds"},
    "long": {"steps", "seen", "evictions", "mean_ms", "seconds"},
    "eviction": {"rows", "left_out", "seconds"},
    "memory": {"rows", "seconds"},
    "prefill": {"rows", "seconds"},
    "transformers": {"rows", "seconds"},
}
ROWS = {
    "eviction": {"model", "policy", "lanes", "ms", "staggered_ms", "step_ms", "share"},
    "prefill": {"dtype", "tokens", "ms", "extra"},
    "memory": {"model", "plan", "held", "peak", "workspaces", "ratio"},
    "transformers": {"model", "lanes", "ms", "why"},
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry"], cwd=tmp_path_factory.mktemp("gpu"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_partial_figures_after_each_section_and_all_in_the_last_line(lines):
    whole = json.loads(lines[-1])
    for line, name in zip(lines, KEYS, strict=False):
        assert json.loads(line) == {name: whole[name]}
    assert whole["bench"] == "gpu"
    assert whole["dry"] is True


def test_keys(lines):
    whole = json.loads(lines[-1])
    for name, keys in KEYS.items():
        assert keys <= set(whole[name]), name
    for name, keys in ROWS.items():
        assert whole[name]["rows"]
        assert all(set(row) == keys for row in whole[name]["rows"]), name
    for row in whole["decode"]["steps"]:
        assert set(row) == {"model", "lanes", "budget", "fresh", "evicted"}
        assert set(row["fresh"]) == set(row["evicted"]) == STATE
    assert whole["decode"]["left_out"] == whole["eviction"]["left_out"] == []
    assert {goal["met"] for goal in whole["goals"]} == {None}


def test_a_dry_run_compares_and_ages_for_real(lines):
    whole = json.loads(lines[-1])
    compared = {name: row for name, row in whole["kernels"].items() if name != "seconds"}
    assert len(compared) >= 30
    assert all(set(row.values()) == {0.0} for row in compared.values())  # both are the twin
    assert whole["graph"]["equal"]
    assert whole["graph"]["evictions"] >= 2
    assert whole["long"]["evictions"] >= 2
    # What was alive at once on the torch path, whose steps take other temporaries than those that are planned.
    assert all(0.99 < row["ratio"] < 1.01 for row in whole["memory"]["rows"])


def test_sections_end_within_eight_minutes():
    assert sum(seconds for _, seconds in SECTIONS.values()) <= 480
    assert list(SECTIONS) == list(KEYS)


@pytest.mark.parametrize(
    "rest, figures",
    [
        ("", {"rows": [1, 2]}),
        ("import os; os.abort()", {"rows": [1, 2], "error": "exit code -6"}),
        ("import time; time.sleep(60)", {"rows": [1, 2], "error": "stopped after 2 s"}),
    ],
)
def test_a_section_that_breaks_or_hangs_keeps_its_figures(rest, figures):
    """The last whole line counts; what else is printed, or half printed, does not."""
    lines = ['{"it": {"rows": [1]}}', "a warning", '{"it": {"rows": [1, 2]}}']
    script = f"for line in {lines}: print(line, flush=True)\nprint('{{\"it\": {{', end='', flush=True)\n{rest}"
    assert apart("it", [sys.executable, "-c", script], 2) == figures


def test_a_section_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry", "--section", "graph"]
    assert apart("graph", command, 60)["equal"]


def test_a_section_that_raises_keeps_its_figures(monkeypatch, capsys):
    def breaks(setting, until):
        yield {"rows": [1]}
        raise ValueError("no")

    monkeypatch.setitem(SECTIONS, "graph", (breaks, 1))
    assert here("graph", True, 1, print_all=True) == {"rows": [1], "error": "ValueError: no"}
    lines = [json.loads(line)["graph"] for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"rows": [1]}, {"rows": [1], "error": "ValueError: no"}]


def test_goals():
    def steps(ratio, model="Qwen3-14B", lanes=16):
        return {"model": model, "lanes": lanes, "evicted": {"ratio": ratio}}

    result = {
        "dry": False,
        "decode": {"steps": [steps(1.1), steps(1.2), steps(9, lanes=1), steps(9, "Qwen3-4B")]},
        "eviction": {"rows": [{"policy": "snapkv", "share": 0.04}, {"policy": "rkv", "share": 0.5}]},
        "memory": {"rows": [{"ratio": 0.995}, {"ratio": 1.004}]},
    }
    found = [(goal["measured"], goal["met"]) for goal in goals(result)]
    assert found == [(1.2, True), (0.04, False), (pytest.approx(0.005), True), (None, None)]
    result["long"] = {"mean_ms": [2.0] * 9 + [2.2]}
    assert goals(result)[-1]["met"] is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: needs a CUDA device")
def test_kernels_and_the_captured_step_on_a_gpu():
    """In a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--only", "kernels", "graph"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout.splitlines()[-1])
    assert whole["graph"]["equal"]
    assert {row["differing"] for row in whole["kernels"].values() if isinstance(row, dict) and "differing" in row} == {
        0.0
    }


def test_the_byte_model_is_the_plan(lines):
    from ringkv.bench.gpu_parts import DRY

    checked = set()
    for row in json.loads(lines[-1])["decode"]["steps"]:
        model = DRY.models[row["model"]]
        plan = Planner(model, torch.bfloat16).plan(RingConfig(row["budget"], DRY.window), row["lanes"])
        embedding = 0 if model.tie_embeddings else (model.vocab_size - row["lanes"]) * model.hidden_size * 2
        held = plan.weights_bytes - embedding + plan.tables["k"].bytes + plan.tables["v"].bytes
        assert row["evicted"]["bytes"] == held
        checked.add(row["model"])
    assert len(checked) == 3
