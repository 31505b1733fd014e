"""Fixtures that every part of the suite shares."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Two workers share two cores: one thread each, and for what they start, or they wait for each other.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the suite in the background has it ignore what its keys send, and some tests send that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGQUIT"):
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# No test hangs on how long a machine takes.
hypothesis.settings.register_profile("ringkv", deadline=None)
hypothesis.settings.load_profile("ringkv")

# transformers probes for a package named `kernels`, and would take ours where the root is on the path.
_ROOT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]

TinyCheckpoint = Callable[..., Path]

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "smollm3": {"num_hidden_layers": 4},
}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A function (family, *, layout=5, shards=False, dtype="float32", seed=0, **config) -> the folder of a checkpoint.

    transformers saves it, with two layers (smollm3: four), small sizes and every parameter random, norms and biases
    included. ``config`` overrides keys of the configuration; ``layout=4`` writes config.json as transformers 4 did;
    ``shards=True`` splits the weights. Equal arguments give the same folder for the whole session: copy it before
    changing it. There is no tokenizer in it.
    """
    made: dict[str, Path] = {}

    def make(
        family: str = "llama",
        *,
        layout: int = 5,
        shards: bool = False,
        dtype: str = "float32",
        seed: int = 0,
        **config: Any,
    ) -> Path:
        key = json.dumps([family, layout, shards, dtype, seed, config], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            _save(folder, family, dtype, seed, "30KB" if shards else "1GB", config)
            if layout == 4:
                as_transformers_4(folder / "config.json")
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_chat_checkpoint(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny checkpoint with a byte-level tokenizer and a chat template. Copy it before changing it."""
    from scripted import TEMPLATE, byte_tokenizer

    tokenizer = byte_tokenizer()
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_checkpoint("qwen3", vocab_size=tokenizer.size + 3, eos_token_id=tokenizer.eos_ids[0]), folder)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skip where no C can be compiled. CI, in which nothing may skip, then fails."""
    from ringkv.kernels.compiled import CannotCompile
    from ringkv.kernels.native import library

    try:
        library()
    except CannotCompile as error:
        pytest.skip(f"no compiled C: {error}")


@pytest.fixture(params=["native", "torch"])
def cpu_path(request: pytest.FixtureRequest) -> str:
    """Both backends of a CPU in float32."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _save(folder: Path, family: str, dtype: str, seed: int, shard_size: str, config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(family, **{**_SIZES, **_FAMILY_SIZES.get(family, {}), **config})
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(built)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.dim() > 1:
                parameter.div_(parameter.shape[-1] ** 0.5)
            else:
                parameter.mul_(0.3).add_(1.0 if "norm" in name else 0.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def as_transformers_4(path: Path) -> None:
    """Rewrite a config.json of transformers 5 in the layout of transformers 4."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.57.0"
    path.write_text(json.dumps(config))
