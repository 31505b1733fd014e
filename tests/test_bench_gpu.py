"""The GPU script, dry: the same code on a CPU, the same keys, and a byte model that is the engine's plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringkv.engine.config import RingConfig
from ringkv.engine.plan import Planner

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"
STATE = {"ms", "bytes", "floor_ms", "ratio"}
KEYS = {
    "kernels": {"seconds"},
    "graph": {"tokens", "evictions", "equal", "seconds"},
    "decode": {"bandwidth", "steps", "left_out", "long", "seconds"},
    "eviction": {"rows", "left_out", "seconds"},
    "prefill": {"rows", "seconds"},
    "memory": {"rows", "seconds"},
    "transformers": {"rows", "seconds"},
}
ROWS = {
    "eviction": {"model", "policy", "lanes", "ms", "step_ms", "share"},
    "prefill": {"dtype", "tokens", "ms", "extra"},
    "memory": {"model", "plan", "held", "peak", "ratio"},
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
    assert whole["decode"]["left_out"] == []
    assert whole["eviction"]["left_out"] is None


def test_a_dry_run_compares_and_ages_for_real(lines):
    whole = json.loads(lines[-1])
    compared = {name: row for name, row in whole["kernels"].items() if name != "seconds"}
    assert len(compared) >= 30
    assert all(set(row.values()) == {0.0} for row in compared.values())  # both are the twin
    assert whole["graph"]["equal"]
    assert whole["graph"]["evictions"] >= 2
    assert whole["decode"]["long"]["evictions"] >= 2
    assert all(row["ratio"] == 1 for row in whole["memory"]["rows"])


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
