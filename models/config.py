"""What a decoder is: every guess about a checkpoint's configuration is made here, once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond ``kind`` and ``theta`` are used by the kinds that name them."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class MoeConfig:
    """A sparse MLP: softmax router over ``experts``, the top ``experts_per_token`` of them run (qwen3_moe)."""

    experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalize: bool  # norm_topk_prob: the chosen experts' weights sum to 1
    layers: tuple[int, ...]  # the layers that are sparse; the others have the dense MLP


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family, in plain numbers and flags. Frozen; built by ``from_hf`` only."""

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
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads
