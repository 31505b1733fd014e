from __future__ import annotations

import importlib
import logging

import pytest
import torch

from ringkv.errors import RingkvError
from ringkv.kernels import backend
from ringkv.kernels.silu import silu_mul

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Elsewhere:
    """Stands in for a tensor on a GPU."""

    device, dtype = GPU, torch.bfloat16


@pytest.fixture
def without_triton(monkeypatch):
    found = importlib.import_module

    def hidden(name, *rest):
        if name == "triton":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(importlib, "import_module", hidden)
    for cached in (backend._found, backend._installed):
        cached.cache_clear()
    yield
    for cached in (backend._found, backend._installed):
        cached.cache_clear()


def test_the_device_chooses():
    assert not backend.runs_triton(torch.empty(0))
    assert backend.runs_triton(Elsewhere)
    assert backend.resolve("auto", CPU, torch.float32) == "torch"
    assert backend.resolve("auto", GPU, torch.bfloat16) == "triton"
    assert backend.resolve("auto", GPU, torch.float64) == "torch"
    assert backend.resolve("torch", GPU, torch.bfloat16) == "torch"
    assert backend.resolve("triton", GPU, torch.bfloat16) == "triton"


def test_an_override_holds_within_its_block():
    with backend.use("torch"):
        assert not backend.runs_triton(Elsewhere)
        with backend.use("triton"):
            assert backend.runs_triton(torch.empty(0))
        assert not backend.runs_triton(Elsewhere)
    assert backend.runs_triton(Elsewhere)


def test_the_launcher_of_the_same_name_runs(monkeypatch):
    launcher = importlib.import_module("ringkv.kernels.silu_triton")
    monkeypatch.setattr(launcher, "silu_mul", lambda x: "kernel")
    with backend.use("triton"):
        assert silu_mul(torch.zeros(1, 2)) == "kernel"
    assert silu_mul(torch.zeros(1, 2)).shape == (1, 1)


@pytest.mark.usefixtures("without_triton")
def test_without_triton_a_gpu_runs_torch_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        assert not backend.runs_triton(Elsewhere)
        assert backend.resolve("auto", GPU, torch.bfloat16) == "torch"
    assert [record.getMessage() for record in caplog.records] == [
        "triton is not installed: the GPU runs the torch path, which is slower"
    ]
    with pytest.raises(RingkvError, match="pip install triton"):
        backend.resolve("triton", GPU, torch.bfloat16)


@pytest.mark.parametrize(
    "name, device, dtype, message",
    [
        ("jax", CPU, torch.float32, "backend = 'jax': accepted is auto, torch, triton"),
        ("triton", CPU, torch.float32, "needs a GPU"),
        ("triton", GPU, torch.float64, "not in float64"),
    ],
)
def test_what_cannot_run_is_refused(name, device, dtype, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RingkvError, match=message):
        backend.resolve(name, device, dtype)
