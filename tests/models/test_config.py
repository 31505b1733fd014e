"""Reading config.json: transformers' configuration classes are the oracle for what an absent key means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from ringkv.errors import RingkvError
from ringkv.models.config import ModelConfig, MoeConfig, RopeConfig
from ringkv.models.families import FAMILIES, HARMLESS

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}


def minimal(family: str = "llama", **keys: Any) -> dict[str, Any]:
    window = {"sliding_window": None} if family == "mistral" else {}
    return {"model_type": family, **SIZES, **window, **keys}


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(RingkvError) as raised:
        ModelConfig.from_hf(config)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_transformers_says(family: str) -> None:
    ours, theirs = ModelConfig.from_hf(minimal(family)), AutoConfig.for_model(**minimal(family))
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert theirs.rope_parameters["rope_type"] == "default"
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qkv_bias == (family == "qwen2" or getattr(theirs, "attention_bias", False))
    assert not ours.o_bias
    assert ours.qk_norm == family.startswith("qwen3")
    rotated = getattr(theirs, "no_rope_layers", None) or [1] * 6
    assert ours.nope_layers == tuple(index for index, one in enumerate(rotated) if not one)
    if family == "qwen3_moe":
        assert ours.moe == MoeConfig(
            experts=theirs.num_experts,
            experts_per_token=theirs.num_experts_per_tok,
            intermediate_size=theirs.moe_intermediate_size,
            normalize=theirs.norm_topk_prob,
            layers=tuple(range(6)),
        )
    else:
        assert ours.moe is None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(family: str) -> None:
    config = AutoConfig.for_model(**minimal(family)).to_dict()
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(
        minimal(family) | {"eos_token_id": config["eos_token_id"]}
    )


# Keys as the files on the hub have them.
HUB: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-4B-FP8": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128]},
    },
    "Mistral-7B-Instruct-v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_published_files_are_read_and_left_alone(name: str) -> None:
    config = copy.deepcopy(HUB[name])
    built = ModelConfig.from_hf(config)
    assert config == HUB[name]
    assert built.dtype == "bfloat16"
    assert built.rope.theta == config["rope_theta"]
    eos = config["eos_token_id"]
    assert built.eos_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert built.group == config["num_attention_heads"] // config["num_key_value_heads"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 2),
        ({"head_dim": None}, 2),
        ({"head_dim": 48}, 48),
        ({"num_attention_heads": 4}, 16),
    ],
)
def test_head_dim(keys: dict[str, Any], expected: int) -> None:
    assert ModelConfig.from_hf(minimal(**keys)).head_dim == expected


def test_biases_by_family() -> None:
    def biases(family: str, **keys: Any) -> tuple[bool, bool, bool]:
        built = ModelConfig.from_hf(minimal(family, **keys))
        return built.qkv_bias, built.o_bias, built.mlp_bias

    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("llama", mlp_bias=True) == (False, False, True)
    assert biases("qwen2") == biases("qwen2", attention_bias=True) == (True, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)
    assert biases("smollm3", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert refused(minimal("qwen2", attention_bias=False)).startswith("attention_bias = False: accepted is true")
    assert refused(minimal("mistral", attention_bias=True)).startswith("attention_bias = True: accepted is false")
    assert refused(minimal("qwen3", mlp_bias=True)).startswith("mlp_bias = True: accepted is false")


def test_layers_without_rope() -> None:
    def nope(**keys: Any) -> tuple[int, ...]:
        return ModelConfig.from_hf(minimal("smollm3", **keys)).nope_layers

    assert nope() == (3,)
    assert nope(no_rope_layer_interval=2) == (1, 3, 5)
    assert nope(no_rope_layers=[1, 0, 1, 1, 0, 1], no_rope_layer_interval=2) == (1, 4)
    assert nope(no_rope_layers=[1] * 9) == ()
    assert "no_rope_layers = [1]: accepted is one 0 or 1 for each" in refused(minimal("smollm3", no_rope_layers=[1]))
    assert "no_rope_layers" in refused(minimal("llama", no_rope_layers=[1] * 6))


def test_sparse_layers() -> None:
    def sparse(**keys: Any) -> tuple[int, ...]:
        moe = ModelConfig.from_hf(minimal("qwen3_moe", **keys)).moe
        return () if moe is None else moe.layers

    assert sparse(decoder_sparse_step=2) == (1, 3, 5)
    assert sparse(mlp_only_layers=[0, 5]) == (1, 2, 3, 4)
    assert sparse(mlp_only_layers=[5], decoder_sparse_step=3) == (2,)
    assert sparse(mlp_only_layers=list(range(6))) == ()


FULL = ["full_attention"] * 6
WINDOWS_ON = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
        ("qwen2", {**WINDOWS_ON, "max_window_layers": 6}),
        ("qwen3", {**WINDOWS_ON, "max_window_layers": 0, "layer_types": FULL}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ("qwen3_moe", {"sliding_window": 8}),
        ("smollm3", {**WINDOWS_ON, "layer_types": FULL}),
        ("mistral", {"use_sliding_window": True, "sliding_window": None, "layer_types": FULL}),
        ("llama", {"layer_types": None}),
    ],
)
def test_full_attention_is_accepted(family: str, keys: dict[str, Any]) -> None:
    plain = {"sliding_window": None} if family == "mistral" else {}
    assert ModelConfig.from_hf(minimal(family, **keys)) == ModelConfig.from_hf(minimal(family, **plain))


SLIDING = ["full_attention"] * 5 + ["sliding_attention"]


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
        (
            "mistral",
            {"sliding_window": 4096, "use_sliding_window": False, "layer_types": FULL},
            "sliding_window = 4096",
        ),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen2", {**WINDOWS_ON, "max_window_layers": 5}, "sliding_window = 8"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window = 4096"),
        ("qwen3", {**WINDOWS_ON, "max_window_layers": 0}, "sliding_window = 8"),
        ("qwen3", {"layer_types": SLIDING}, "layer_types = "),
        ("qwen3", {"layer_types": FULL[:5]}, "layer_types = "),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types = "),
        ("qwen3_moe", {**WINDOWS_ON, "max_window_layers": 6, "layer_types": FULL}, "sliding_window = 8"),
        ("smollm3", {**WINDOWS_ON, "max_window_layers": 6}, "sliding_window = 8"),
    ],
)
def test_a_real_window_is_refused(family: str, keys: dict[str, Any], named: str) -> None:
    assert refused(minimal(family, **keys)).startswith(named)


def test_mistral_without_the_key_has_a_window() -> None:
    assert refused({"model_type": "mistral", **SIZES}).startswith("sliding_window = 4096")


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": parameters}


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "gemma2"}, "model_type = 'gemma2'"),
        ({"model_type": None}, "model_type = None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
        ({"architectures": "LlamaForCausalLM"}, "architectures = "),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map = "),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.quant_method = 'gptq'"),
        ({"quantization_config": {}}, "quantization_config.quant_method = absent"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size = absent"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "quantization_config.weight_block_size = [128]",
        ),
        (
            {"quantization_config": {**FP8, "activation_scheme": "static"}},
            "quantization_config.activation_scheme = 'static'",
        ),
        ({"quantization_config": {**FP8, "bits": 3}}, "quantization_config.bits = 3"),
        ({"logit_scale": 2.0}, "logit_scale = 2.0: this key is not supported"),
        ({"use_parallel_residual": False}, "use_parallel_residual = False"),
        ({"a\nb" * 50: 1}, "'a\\nba"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"is_causal": False}, "is_causal = False"),
        ({"use_mrope": 0}, "use_mrope = 0"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor = True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads = "),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_hidden_layers": 6.0}, "num_hidden_layers = 6.0"),
        ({"num_attention_heads": -4}, "num_attention_heads = -4"),
        ({"num_attention_heads": 48}, "hidden_size = 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5"),
        ({"num_key_value_heads": 64}, "num_key_value_heads = 64"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"vocab_size": "96"}, "vocab_size = '96'"),
        ({"hidden_size": 10**4000}, "hidden_size = "),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ({"eos_token_id": -1}, "eos_token_id = -1"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id = [1, '2']"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "torch_dtype = 'float16'"),
        ({"rope_theta": 1.0}, "rope_theta = 1.0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_parameters.rope_theta = 100000.0"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "rope_scaling = "),
        (rope(rope_type="longrope", factor=2.0), "rope_scaling.rope_type = 'longrope'"),
        (rope(type="mrope"), "rope_scaling.type = 'mrope'"),
        (rope(type="linear", rope_type="yarn", factor=2.0), "rope_scaling.type = 'linear'"),
        (rope(rope_type=["yarn"]), "rope_scaling.rope_type = ['yarn']"),
        (rope(factor=2.0), "rope_scaling.factor = 2.0: this key is not supported"),
        (rope(rope_type="linear"), "rope_scaling.factor is missing"),
        (rope(rope_type="linear", factor=0.5), "rope_scaling.factor = 0.5"),
        (rope(rope_type="linear", factor="2"), "rope_scaling.factor = '2'"),
        (rope(rope_type="dynamic", factor=2.0), "head_dim = 2"),
        (rope(rope_type="llama3", factor=8.0, high_freq_factor=4.0), "rope_scaling.low_freq_factor is missing"),
        (
            rope(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0),
            "rope_scaling.high_freq_factor = 4.0",
        ),
        (rope(**YARN, attn_factor=0.8), "rope_scaling.attn_factor = 0.8"),
        (rope(**YARN, attention_factor=0.0), "rope_scaling.attention_factor = 0.0"),
        (rope(**YARN, beta_fast=1, beta_slow=2), "rope_scaling.beta_fast = 1"),
        (rope(**YARN, truncate=None), "rope_scaling.truncate = None"),
        (rope(**YARN, original_max_position_embeddings=0), "rope_scaling.original_max_position_embeddings = 0"),
        (rope(**YARN, partial_rotary_factor=0.5), "rope_scaling.partial_rotary_factor = 0.5"),
        (
            rope(**YARN, original_max_position_embeddings=64) | {"original_max_position_embeddings": 65},
            "rope_scaling.original_max_position_embeddings = 64",
        ),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings = 64"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention = "),
        (rope(rope_type="gguf_factors", factors=[1.0, 2.0]), "rope_scaling.factors = [1.0, 2.0]"),
        (rope(rope_type="gguf_factors", factors=[0.0]), "rope_scaling.factors.0 = 0.0"),
    ],
)  # fmt: skip
def test_refused_by_name(keys: dict[str, Any], named: str) -> None:
    assert refused(minimal(**keys)).startswith(named)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_experts": 4}, "num_experts_per_tok = absent: accepted is an int from 1 to 4"),
        ({"num_experts": 4, "num_local_experts": 4}, "num_local_experts = 4"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers = [6]"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size = -1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1"),
    ],
)
def test_refused_of_a_mixture(keys: dict[str, Any], named: str) -> None:
    assert refused(minimal("qwen3_moe", **keys)).startswith(named)


@pytest.mark.parametrize("key", ["model_type", *SIZES])
def test_the_sizes_are_required(key: str) -> None:
    config = minimal()
    del config[key]
    assert refused(config).startswith(f"{key} is missing")


def test_what_changes_nothing_may_say_anything() -> None:
    odd: dict[str, Any] = dict(zip(sorted(HARMLESS - {"architectures"}), [7, "x", None, [1], {}] * 40, strict=False))
    assert len(odd) == len(HARMLESS) - 1
    assert ModelConfig.from_hf(minimal() | odd) == ModelConfig.from_hf(minimal())
    assert ModelConfig.from_hf(minimal(never_heard_of=None)) == ModelConfig.from_hf(minimal())


def test_a_built_configuration_passes_through() -> None:
    built = ModelConfig.from_hf(minimal())
    assert ModelConfig.from_hf(built) is built


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["full_attention", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {key for config in HUB.values() for key in config} | set(minimal("smollm3")) | {"no_rope_layers", "dtype"}
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.sampled_from(sorted(HUB)), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_any_value_is_read_or_refused(name: str, changes: dict[str, Any]) -> None:
    message = ""
    try:
        ModelConfig.from_hf(HUB[name] | changes)
    except RingkvError as error:
        message = str(error)
    assert "\n" not in message
