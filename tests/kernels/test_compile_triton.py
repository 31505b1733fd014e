"""Kernels compiled ahead of time for GPUs that are not here: spills, shared memory, and the width of the accesses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_checks import rows_of

SHARED = {
    "90": 227 << 10,
    "80": 163 << 10,
    "89": 99 << 10,
    "120": 99 << 10,
    "gfx942": 64 << 10,
}  # bytes a block may have


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One for each kernel, model and target. In a process of its own: where the interpreter runs, nothing compiles."""
    return rows_of(Path(__file__).with_name("aot.py"), tmp_path_factory.mktemp("aot"))


def test_figures(rows):
    for row in rows:
        print(
            "{model:14}{target:8}{dtype:6}{kernel:28}{registers:4} registers{shared:8} shared{spills:6} spilled".format(
                **row
            )
        )
    assert {row["target"] for row in rows} == set(SHARED)
    assert len({row["model"] for row in rows}) == 10
    assert [row for row in rows if row["shared"] > SHARED[row["target"]]] == []
    assert [row for row in rows if row["spills"] and row["dtype"] != "fp32"] == []


def test_every_kernel_is_compiled(rows):
    """What no step and no eviction launches would go unseen."""
    launched = {
        path.stem.removesuffix("_triton") + name
        for path in (Path(__file__).parents[2] / "kernels").glob("*_triton.py")
        for name in re.findall(r"^\s+(_\w+)\[", path.read_text(), re.MULTILINE)
    }
    assert {row["kernel"] for row in rows} == launched


def test_keys_and_values_move_in_vectors_of_16_bytes(rows):
    hopper = [row for row in rows if row["target"] == "90" and row["dtype"] == "bf16" and "accesses" in row]
    checked = {(row["kernel"], row["model"]): row["accesses"] for row in hopper}
    for model in ("Qwen3-8B", "Llama-3.1-8B", "SmolLM2"):
        append = checked["append_append", model]
        # Two halves each of the output, the query ring, keys and values; the mark and the range are single words.
        assert append["store 16"] == 8
        assert append["store 4"] <= 2
        assert not {"store 1", "store 2", "store 8"} & set(append)
        assert append["load 16"] == 2
    for model in ("Qwen3-8B", "Qwen3-0.6B", "SmolLM2"):
        attend = checked["attention_attend", model]
        # Keys and values are copied asynchronously; what is loaded in single words are marks and counts.
        assert attend["copy 16"] >= 16
        assert set(attend) <= {"copy 16", "copy 4", "load 16", "load 4", "load 1", "store 16", "store 4"}
        assert attend.get("load 4", 0) <= 8
