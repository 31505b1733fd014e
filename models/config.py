"""The configuration of a decoder. This is the only module that interprets the keys of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.fp8 import block_size
from ringkv.models.families import FAMILIES, FIXED, HARMLESS, Family
from ringkv.models.keys import Keys

DTYPES = ("float32", "float16", "bfloat16", "float64")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "gguf_factors")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. The comment beside a field names the kinds that use it."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn | gguf_factors
    theta: float = 10000.0
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    factors: tuple[float, ...] = ()  # gguf_factors: D/2 divisors, one for each inverse frequency


@dataclass(frozen=True)
class MoeConfig:
    """A sparse MLP: a softmax router picks ``experts_per_token`` of ``experts`` for each token (qwen3_moe)."""

    experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # norm_topk_prob: the chosen experts' weights sum to 1
    layers: tuple[int, ...]  # the sparse layers; the others have a dense MLP


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family, in plain numbers and flags. ``from_hf`` builds one from a checkpoint's keys."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's query and key, before RoPE
    nope_layers: tuple[int, ...] = ()  # layers without rotary embedding (smollm3)
    moe: MoeConfig | None = None
    dtype: str = "float32"  # the checkpoint's own
    eos_ids: tuple[int, ...] = ()  # eos_token_id of config.json

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | ModelConfig) -> ModelConfig:
        """Build the configuration that the keys of a ``config.json`` describe.

        The layouts of transformers 4 and 5 are read. An absent key means what it means in transformers' configuration
        class of the family; only the model type and the five sizes that every configuration has are required. A key
        that is not read must be known to change nothing (``families.HARMLESS``) or be null.

        Args:
            config: the keys, or a ModelConfig, which is returned as it is.

        Raises:
            RingkvError: a key is missing, out of range, contradictory or not supported. The message names it.
        """
        if isinstance(config, ModelConfig):
            return config
        keys = Keys(config)
        model_type = keys.choice("model_type", tuple(FAMILIES))
        family = FAMILIES[model_type]
        _architecture(keys, family)
        layers = keys.integer("num_hidden_layers", high=1024)
        heads = keys.integer("num_attention_heads", high=4096)
        hidden = keys.integer("hidden_size", high=1 << 20)
        head_dim = _head_dim(keys, family, hidden, heads)
        max_position = keys.integer("max_position_embeddings", family.max_position)
        nope = _nope_layers(keys, layers) if family.nope else ()
        _refuse_windows(keys, family, layers)
        block_size(keys.raw("quantization_config", None))
        attention_bias = _bias(keys, "attention_bias", family.attention_bias)
        built = cls(
            model_type=model_type,
            vocab_size=keys.integer("vocab_size", high=1 << 24),
            hidden_size=hidden,
            intermediate_size=keys.integer("intermediate_size", high=1 << 24),
            layers=layers,
            heads=heads,
            kv_heads=_kv_heads(keys, family, heads),
            head_dim=head_dim,
            rms_eps=keys.number("rms_norm_eps", 1e-6),
            rope=_rope(keys, family, max_position, head_dim),
            max_position_embeddings=max_position,
            tie_embeddings=keys.flag("tie_word_embeddings", family.tie),
            qkv_bias=attention_bias,
            o_bias=attention_bias and family.attention_bias is None,
            mlp_bias=_bias(keys, "mlp_bias", family.mlp_bias),
            qk_norm=family.qk_norm,
            nope_layers=nope,
            moe=_moe(keys, layers) if family.moe else None,
            dtype=_dtype(keys),
            eos_ids=keys.token_ids("eos_token_id"),
        )
        keys.finish(HARMLESS, FIXED)
        return built


def _architecture(keys: Keys, family: Family) -> None:
    """Refuse weights of another class: a reward model or a draft head has the same configuration but for this key."""
    named = keys.raw("architectures", None)
    if named is not None and (not isinstance(named, list) or family.architecture not in named):
        raise keys.refuse("architectures", f'["{family.architecture}"]')
    remote = keys.raw("auto_map", None)
    if isinstance(remote, dict):
        remote = [name for name in remote if name not in ("AutoTokenizer", "AutoConfig")]
    if remote:
        raise keys.refuse("auto_map", "null: code that comes with a checkpoint is never run")


def _head_dim(keys: Keys, family: Family, hidden: int, heads: int) -> int:
    if keys.raw("head_dim", family.head_dim) is None and family.head_dim is None:
        if hidden % heads:
            raise keys.refuse("hidden_size", f"a multiple of num_attention_heads = {heads} if head_dim is absent")
        head_dim, key = hidden // heads, "hidden_size"
    else:
        head_dim, key = keys.integer("head_dim", family.head_dim, high=4096), "head_dim"
    if head_dim % 2:
        raise keys.refuse(key, f"a value that gives an even head_dim; this gives {head_dim}")
    return head_dim


def _kv_heads(keys: Keys, family: Family, heads: int) -> int:
    value = keys.raw("num_key_value_heads", family.kv_heads)
    kv_heads = heads if value is None else keys.integer("num_key_value_heads", family.kv_heads, high=heads)
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    return kv_heads


def _bias(keys: Keys, key: str, fixed: bool | None) -> bool:
    value = keys.flag(key, fixed or False)
    if fixed is not None and value != fixed:
        raise keys.refuse(key, f"{str(fixed).lower()}, as in every model of this type")
    return value


def _nope_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """The layers without rotary embedding: those with a 0 in no_rope_layers, else every no_rope_layer_interval-th."""
    interval = keys.integer("no_rope_layer_interval", 4)
    if "no_rope_layers" not in keys:
        return tuple(range(interval - 1, layers, interval))
    rotated = keys.integers("no_rope_layers", high=1)
    if len(rotated) < layers:
        raise keys.refuse("no_rope_layers", f"one 0 or 1 for each of {layers} layers")
    return tuple(index for index in range(layers) if not rotated[index])


def _refuse_windows(keys: Keys, family: Family, layers: int) -> None:
    """Refuse attention over a sliding window in any layer."""
    types = keys.raw("layer_types", None)
    if types is not None and types != ["full_attention"] * layers:
        raise keys.refuse("layer_types", f'"full_attention" for each of {layers} layers')
    first = keys.integer("max_window_layers", 28, low=0)
    used = keys.flag("use_sliding_window", False) or not family.window_flag
    window = keys.raw("sliding_window", family.window)
    if window is not None:
        window = keys.integer("sliding_window", family.window)
    spared = (types is not None and "layer_types" in family.window_scope) or (
        first >= layers and "max_window_layers" in family.window_scope
    )
    if used and window is not None and not spared:
        raise RingkvError(f"sliding_window = {window}: accepted is null: attention over a window is not supported")


def _moe(keys: Keys, layers: int) -> MoeConfig | None:
    names = [name for name in ("num_experts", "num_local_experts") if name in keys]
    if len(names) > 1:
        raise keys.refuse("num_local_experts", "null beside num_experts")
    most = min(1024, (1 << 17) // layers)  # five times what the largest public models have: each has names of its own
    experts = keys.integer(names[0], high=most) if names else 128
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.integers("mlp_only_layers", high=layers - 1) if "mlp_only_layers" in keys else ()
    moe = MoeConfig(
        experts=experts,
        experts_per_token=keys.integer("num_experts_per_tok", 8, high=experts),
        intermediate_size=keys.integer("moe_intermediate_size", 768, high=1 << 24),
        normalize=keys.flag("norm_topk_prob", False),
        layers=tuple(index for index in range(layers) if index not in dense and (index + 1) % step == 0),
    )
    return moe if moe.layers else None


def _dtype(keys: Keys) -> str:
    named = [keys.choice(key, DTYPES) for key in ("dtype", "torch_dtype") if key in keys]
    if len(set(named)) > 1:
        raise keys.refuse("torch_dtype", f"{named[0]}, the value of dtype")
    return named[0] if named else "float32"


def _rope(keys: Keys, family: Family, max_position: int, head_dim: int) -> RopeConfig:
    """Read ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5)."""
    old, new = keys.object("rope_scaling"), keys.object("rope_parameters")
    if "rope_scaling" in keys and "rope_parameters" in keys:
        raise keys.refuse("rope_scaling", "null beside rope_parameters")
    rope = old if "rope_scaling" in keys else new
    kinds = {rope.choice(key, ROPE_KINDS) for key in ("rope_type", "type") if key in rope}
    if len(kinds) > 1:
        raise rope.refuse("type", "the value of rope_type")
    kind = kinds.pop() if kinds else "default"

    thetas = {where.number("rope_theta", low=1.0) for where in (keys, rope) if "rope_theta" in where}
    if len(thetas) > 1:
        raise rope.refuse("rope_theta", "the value of the outer rope_theta")
    values: dict[str, Any] = {"kind": kind, "theta": thetas.pop() if thetas else family.theta}
    if "partial_rotary_factor" in rope:
        rope.choice("partial_rotary_factor", FIXED["partial_rotary_factor"])
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        values["factor"] = rope.number("factor", low=1.0, above=False)
    if kind in ("llama3", "yarn"):
        originals = {w.integer(_ORIGINAL) for w in (keys, rope) if _ORIGINAL in w}
        if len(originals) > 1:
            raise rope.refuse(_ORIGINAL, "the value of the outer key of this name")
        values[_ORIGINAL] = originals.pop() if originals else max_position
    if kind == "dynamic" and head_dim == 2:
        raise RingkvError("head_dim = 2: accepted is at least 4 with dynamic RoPE")
    if kind == "llama3":
        low = values["low_freq_factor"] = rope.number("low_freq_factor")
        values["high_freq_factor"] = rope.number("high_freq_factor", low=low)
    if kind == "yarn":
        for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if key in rope:
                values[key] = rope.number(key)
        values["truncate"] = rope.flag("truncate", True)
    if kind == "gguf_factors":
        factors = rope.raw("factors")
        if not isinstance(factors, list | tuple) or len(factors) != head_dim // 2:
            raise rope.refuse("factors", f"{head_dim // 2} numbers")
        by_index = Keys({str(index): factor for index, factor in enumerate(factors)}, "rope_scaling.factors.")
        values["factors"] = tuple(by_index.number(str(index)) for index in range(len(factors)))
    rope.finish()
    built = RopeConfig(**values)
    if built.beta_fast < built.beta_slow:
        raise rope.refuse("beta_fast", f"at least beta_slow = {built.beta_slow:g}")
    return built
