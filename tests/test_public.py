"""The public names: lazy, complete, and those of README."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest

import ringkv


def test_every_name_is_there():
    assert set(ringkv.__all__) - {"__version__"} == set(ringkv._HOME)
    for name in ringkv.__all__:
        assert getattr(ringkv, name) is not None
    assert dir(ringkv) == sorted(ringkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ringkv.Nothing


def test_import_is_lazy_and_needs_no_triton():
    """CASES W6: also where triton cannot be imported at all, a model generates."""
    code = """
import sys
sys.modules["triton"] = None
import ringkv
assert "torch" not in sys.modules
import torch
from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder
config = ModelConfig("llama", 20, 8, 8, 1, 2, 1, 4, 1e-6, RopeConfig(), 64, True)
model = Decoder(config, torch.device("cpu"), torch.float32)
for view in model.destinations().values():
    torch.nn.init.normal_(view)
with ringkv.Engine(model, ring=ringkv.RingConfig(8, 2)) as engine:
    done = engine.generate([1, 2, 3], ringkv.SamplingParams(max_tokens=30, ignore_eos=True))
assert done.ring["evictions"] > 5 and done.backend in ("native", "torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


WITH_EXAMPLES = sorted(set(ringkv.__all__) - {"__version__", "Completion"})


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_the_public_names_run(name, monkeypatch, capsys):
    policies = sys.modules[ringkv.Policy.__module__].POLICIES
    known = dict(policies)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    public = getattr(ringkv, name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(public, name):
        runner.run(test)
    policies.clear()
    policies.update(known)
    assert runner.summarize(verbose=False).attempted
    assert not runner.failures, capsys.readouterr().out
