from __future__ import annotations

import importlib
import logging
import re

import pytest
import torch

from ringkv.errors import RingkvError
from ringkv.kernels import backend, native
from ringkv.kernels.table import advance, silu_mul

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Elsewhere:
    """Stands in for a tensor on a GPU."""

    device, dtype = GPU, torch.bfloat16


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(backend, "_no_triton", lambda device: None)


@pytest.fixture
def without_triton(monkeypatch):
    found = importlib.import_module

    def hidden(name, *rest):
        if name == "triton":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(importlib, "import_module", hidden)
    backend._no_triton.cache_clear()
    yield
    backend._no_triton.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    for cached in (backend._not_compiled, native.library):
        cached.cache_clear()
    yield
    for cached in (backend._not_compiled, native.library):
        cached.cache_clear()


@pytest.mark.usefixtures("compiled", "with_gpu")
def test_the_device_and_the_type_choose():
    assert backend.path_of(torch.empty(0)) == "native"
    assert backend.path_of(torch.empty(0, dtype=torch.float64)) == "torch"
    assert backend.path_of(torch.empty(0, device="meta")) == "torch"
    assert backend.path_of(Elsewhere) == "triton"
    assert backend.resolve("auto", CPU, torch.float32) == "native"
    assert backend.resolve("native", CPU, torch.float32) == "native"
    assert backend.resolve("auto", CPU, torch.bfloat16) == "torch"
    assert backend.resolve("auto", GPU, torch.bfloat16) == "triton"
    assert backend.resolve("torch", GPU, torch.bfloat16) == "torch"
    assert backend.resolve("triton", GPU, torch.bfloat16) == "triton"


@pytest.mark.usefixtures("with_gpu")
def test_an_override_holds_within_its_block():
    with backend.use("torch"):
        assert backend.path_of(Elsewhere) == "torch"
        with backend.use("triton"):
            assert backend.path_of(torch.empty(0)) == "triton"
        assert backend.path_of(Elsewhere) == "torch"
    assert backend.path_of(Elsewhere) == "triton"


def test_the_launcher_of_the_same_name_runs(monkeypatch):
    launcher = importlib.import_module("ringkv.kernels.silu_triton")
    monkeypatch.setattr(launcher, "silu_mul", lambda x: "kernel")
    backend.launchers.cache_clear()
    with backend.use("triton"):
        assert silu_mul(torch.zeros(1, 2)) == "kernel"
    backend.launchers.cache_clear()
    assert silu_mul(torch.zeros(1, 2)).shape == (1, 1)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_a_cpu_runs_torch(caplog):
    with caplog.at_level(logging.INFO):
        assert backend.path_of(torch.empty(0)) == "torch"
        assert backend.resolve("auto", CPU, torch.float32) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "a CPU runs the torch path, which is slower: there is no cc, gcc or clang"
    ]
    message = re.escape("backend: 'native' needs a C compiler with OpenMP: there is no cc, gcc or clang")
    with pytest.raises(RingkvError, match=message):
        backend.resolve("native", CPU, torch.float32)


@pytest.mark.usefixtures("compiled")
def test_an_operation_without_compiled_code_is_its_twin(monkeypatch):
    monkeypatch.setattr(native, "silu_mul", lambda x: "compiled")
    backend.launchers.cache_clear()
    count, seen = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with backend.use("native"):
        assert silu_mul(torch.zeros(1, 2)) == "compiled"
        advance(torch.tensor([True, False]), count, seen)
    backend.launchers.cache_clear()
    assert seen.tolist() == [1, 0]


@pytest.mark.usefixtures("without_triton")
def test_without_triton_a_gpu_runs_torch_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert backend.path_of(Elsewhere) == "torch"
        assert backend.resolve("auto", GPU, torch.bfloat16) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "a GPU runs the torch path, which is slower: triton is not installed; run: pip install triton"
    ]
    with pytest.raises(RingkvError, match="pip install triton"):
        backend.resolve("triton", GPU, torch.bfloat16)


def test_a_gpu_that_cannot_launch_a_kernel_runs_torch_and_says_so_once(monkeypatch, caplog):
    """As where there is no C compiler, which triton needs for each kernel."""

    def launch(*args):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    monkeypatch.setitem(backend.OPERATIONS, "philox", launch)
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **options: torch.empty(*args, **options))
    backend._no_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert backend.path_of(Elsewhere) == backend.resolve("auto", GPU, torch.bfloat16) == "torch"
        assert [record.getMessage() for record in caplog.records] == [
            "a GPU runs the torch path, which is slower: Failed to find C compiler."
        ]
        with pytest.raises(RingkvError, match="backend: 'triton' cannot run here: Failed to find C compiler"):
            backend.resolve("triton", GPU, torch.bfloat16)
    finally:
        backend._no_triton.cache_clear()


def test_a_device_that_launches_kernels_runs_them():
    assert backend._no_triton(CPU) is None  # in the interpreter


@pytest.mark.parametrize(
    "name, device, dtype, message",
    [
        ("jax", CPU, torch.float32, "backend = 'jax': accepted is auto, torch, triton, native"),
        ("native", GPU, torch.float32, "'native' computes in float32 on a CPU; this is float32 on cuda"),
        ("native", CPU, torch.bfloat16, "'native' computes in float32 on a CPU; this is bfloat16 on cpu"),
        ("triton", CPU, torch.float32, "needs a GPU"),
        ("triton", GPU, torch.float64, "dtype: 'float64' is computed on a CPU only; a GPU accepts float32, float16"),
        ("auto", GPU, torch.float64, "dtype: 'float64' is computed on a CPU only"),
        ("triton", CPU, torch.float64, "needs a GPU"),
    ],
)
def test_what_cannot_run_is_refused(name, device, dtype, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RingkvError, match=message):
        backend.resolve(name, device, dtype)
