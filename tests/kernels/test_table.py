"""The table of operations: what it names is there, and what is there it names."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from ringkv.kernels import backend, native, table
from ringkv.kernels.backend import MISSING, OPERATIONS, Operation

KERNELS = Path(__file__).parents[2] / "kernels"
ENTRIES = [(name, path) for name in OPERATIONS for path in ("triton", "native")]
# What else a module of launchers offers: parts of an operation, and what other launchers share.
PARTS = {
    "append_triton": {"append"},
    "attention_triton": {"decode_attention"},
    "scores_triton": {"summed_attention", "tile"},
    "native": {"library"},
}


def functions(module) -> set[str]:
    """The public functions that a module defines, kernels apart."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(inspect.unwrap(value) if callable(value) else value)
        and not name.startswith("_")
        and inspect.unwrap(value).__module__ == module.__name__
        and not hasattr(value, "fn")
    }


@pytest.mark.parametrize("name, path", ENTRIES)
def test_a_launcher_has_the_twins_signature(name, path):
    operation = OPERATIONS[name]
    assert getattr(table, name) is operation
    if operation.modules[path] is not MISSING:
        launcher = getattr(importlib.import_module(f"ringkv.kernels.{operation.modules[path]}"), name)
        assert str(inspect.signature(launcher)) == str(inspect.signature(operation.twin))


def test_every_launcher_stands_in_the_table():
    modules = [path.stem for path in KERNELS.glob("*_triton.py")] + ["native"]
    for name in modules:
        path = "native" if name == "native" else "triton"
        named = {each for each, operation in OPERATIONS.items() if operation.modules[path] == name}
        found = functions(importlib.import_module(f"ringkv.kernels.{name}"))
        assert found == named | PARTS.get(name, set()), name


def test_a_missing_entry_runs_the_twin():
    assert backend.launchers("native")["lowest"] is OPERATIONS["lowest"].twin
    assert backend.launchers("native")["sample"] is native.sample


def test_a_misspelt_launcher_is_an_error_of_its_path(monkeypatch):
    def silu_mull(x):
        return x

    monkeypatch.setattr(backend, "OPERATIONS", dict(OPERATIONS))
    backend.launchers.cache_clear()
    Operation(silu_mull, triton=MISSING, native="native")
    with pytest.raises(AttributeError, match="silu_mull"):
        backend.launchers("native")
    assert backend.launchers("triton")["silu_mull"] is silu_mull
    backend.launchers.cache_clear()
