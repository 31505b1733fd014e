"""What a decode step must read from memory: the floor that a measurement is held against."""

from __future__ import annotations

from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder


def bytes_read(model: Decoder, lanes: int, slots: int) -> int:
    """Bytes that one step reads: every weight once, and the keys and values of all slots that attention looks at.

    Args:
        lanes: sequences that run.
        slots: read a KV head, summed over layers and lanes: the live ones until the first eviction, then all of them.
    """
    config = model.config
    weights = weight_bytes(config, lanes, model.weight_dtype.itemsize)
    return weights + slots * slot_bytes(config, model.dtype.itemsize) // config.layers


def slot_bytes(model: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token, all layers."""
    return model.layers * model.kv_heads * 2 * model.head_dim * itemsize


def weight_bytes(model: ModelConfig, lanes: int, itemsize: int) -> int:
    """The weights that a step reads.

    An untied embedding is read in ``lanes`` rows only; of a sparse MLP the routed experts count, once for each lane as
    long as there are that many.

    Args:
        itemsize: bytes of a number.
    """
    hidden, d = model.hidden_size, model.head_dim
    q, kv = model.heads * d, model.kv_heads * d
    attention = hidden * (q + 2 * kv) + q * hidden + 2 * hidden
    attention += (q + 2 * kv) * model.qkv_bias + hidden * model.o_bias + 2 * d * model.qk_norm
    dense = 3 * hidden * model.intermediate_size + (2 * model.intermediate_size + hidden) * model.mlp_bias
    sparse_layers, sparse = 0, 0
    if model.moe is not None:
        sparse_layers = len(model.moe.layers)
        experts = min(model.moe.experts, lanes * model.moe.experts_per_token)
        sparse = hidden * model.moe.experts + experts * 3 * hidden * model.moe.intermediate_size
    mlps = (model.layers - sparse_layers) * dense + sparse_layers * sparse
    embedding = 0 if model.tie_embeddings else lanes * hidden
    return itemsize * (model.layers * attention + mlps + hidden + model.vocab_size * hidden + embedding)
