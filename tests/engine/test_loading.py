"""What the options device, dtype and backend come to, before and without a load."""

from __future__ import annotations

import pytest
import torch

from ringkv import Engine, RingConfig, RingkvError
from ringkv.engine import loading
from ringkv.engine.loading import DTYPES, resolve_runtime
from ringkv.models.config import MoeConfig
from tiny import tiny_config, tiny_weights

RING = RingConfig(40, 8)
MODELS = {"dense": tiny_config(), "sparse": tiny_config("qwen3", moe=MoeConfig(4, 2, 24, True, (1,)))}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
@pytest.mark.parametrize("model", MODELS)
def test_a_runtime_is_the_one_of_the_engine_that_is_then_built(model, dtype, backend):
    config = MODELS[model]
    told = resolve_runtime(config, dtype=dtype, backend=backend)
    with Engine(tiny_weights(config), config=config, ring=RING, dtype=dtype, backend=backend) as engine:
        assert (told.device, told.dtype, told.backend) == (engine.model.device, engine.model.dtype, engine.backend)
        assert told.packed is (engine.model.weight_dtype != engine.model.dtype)


def test_the_backend_of_auto_depends_on_the_dtype():
    """C computes in float32: what is given in another type runs on torch, and packed weights do not count."""
    backends = {dtype: resolve_runtime(MODELS["dense"], device="cpu", dtype=dtype).backend for dtype in DTYPES}
    native = resolve_runtime(MODELS["dense"], device="cpu", dtype="float32").backend
    assert backends == {"float16": native, "bfloat16": "torch", "float32": native, "float64": "torch"}
    assert resolve_runtime(MODELS["sparse"], device="cpu", dtype="float16").backend == "torch"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "tpu"}, "device = 'tpu': accepted is auto, cpu"),
        ({"device": 7}, "device = 7: accepted is auto, cpu"),
        ({"dtype": "int8"}, "dtype = 'int8': accepted is auto, float16, bfloat16, float32, float64"),
        ({"dtype": "float64", "backend": "native"}, "'native' computes in float32 on a CPU; this is float64 on cpu"),
    ],
)
def test_what_cannot_run_is_refused_before_a_weight_is_read(options, message, monkeypatch):
    monkeypatch.setattr(loading, "load_decoder", None)
    config = MODELS["dense"]
    for refused in (resolve_runtime, lambda config, **options: Engine(tiny_weights(config), config=config, **options)):
        with pytest.raises(RingkvError) as error:
            refused(config, **options)
        assert message in str(error.value)


@pytest.mark.parametrize("option", [{"lanes": 0}, {"threads": 0}, {"backend": "cuda"}, {"seed": "x"}, {"ring": 1}])
def test_options_are_refused_before_a_checkpoint_is_looked_for(option):
    with pytest.raises(RingkvError, match=next(iter(option))):
        Engine.from_pretrained("there/is no such model", **option)


def test_a_configuration_that_is_refused_names_its_checkpoint(tiny_checkpoint, tmp_path):
    weights = tiny_weights(MODELS["dense"], torch.float32)
    with pytest.raises(RingkvError, match=r"^state dict: model_type = 'gpt2': accepted is"):
        Engine(weights, config={"model_type": "gpt2"})
