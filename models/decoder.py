"""One decoder for every family: flags in ``ModelConfig``, not a file a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.rotate import Angles, split_rotate
from ringkv.kernels.table import add_rms_norm, silu_mul
from ringkv.models.config import ModelConfig, MoeConfig
from ringkv.models.linear import AnyLinear, Linear
from ringkv.models.moe import SparseMlp
from ringkv.models.rope import Rope

# Rows of a long prompt that go through an MLP at once: bounds its activations, the widest tensors of a prefill.
MLP_ROWS = 1024


@dataclass
class Mlp:
    """The gated MLP; gate and up are one product."""

    gate_up: AnyLinear
    down: AnyLinear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


@dataclass
class Layer:
    """The weights of one decoder layer; q, k and v are one product."""

    index: int
    input_norm: Tensor
    qkv: AnyLinear
    qk_norms: tuple[Tensor, Tensor] | None
    o: AnyLinear
    mlp_norm: Tensor
    mlp: Mlp | SparseMlp


# Called once a layer with the layer and its fused projection [n, (Hq + 2H) * D]; returns the heads' outputs
# [n, Hq * D]. This is all a decoder knows of a cache.
Attention = Callable[[Layer, Tensor], Tensor]


class Decoder:
    """A Llama-family decoder: parameters, and the arithmetic around an attention that the caller supplies.

    Args:
        config: what to build.
        device, dtype: where the parameters live and what they are; also the type of the activations.

    Attributes:
        weight_dtype: what the weights are kept in: ``dtype``, or float16 once it is packed.

    The parameters are allocated, not set: fill every view of ``destinations()``.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self._destinations: dict[str, Tensor] = {}
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings, device)
        self.embedding = self._parameter((config.vocab_size, config.hidden_size), "model.embed_tokens.weight")
        self.layers = [self._layer(index) for index in range(config.layers)]
        self.norm = self._parameter((config.hidden_size,), "model.norm.weight")
        self.head: AnyLinear = Linear(
            self.embedding
            if config.tie_embeddings
            else self._parameter((config.vocab_size, config.hidden_size), "lm_head.weight")
        )
        self.weight_dtype = dtype
        self._packed_bytes = 0

    def destinations(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold, by name, with the view that it fills."""
        return dict(self._destinations)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters; a packed decoder holds a tied embedding twice, as rows and as a product."""
        return self._packed_bytes or sum(view.nbytes for view in self._destinations.values())

    def pack(self) -> None:
        """Keep the weights of the products, and the embedding, in float16; activations stay float32.

        For a float32 decoder whose parameters are set, on a CPU where ``can_pack()``; not for a mixture of experts.
        The parameters cannot be set again: ``destinations`` has nothing but shapes from here on.
        """
        if self.dtype != torch.float32 or self.config.moe is not None:
            raise ValueError("only a dense decoder in float32 can be packed")
        norms = [view for name, view in self._destinations.items() if name.endswith("norm.weight")]
        self._destinations = {name: view.to("meta") for name, view in self._destinations.items()}
        self.head, self.embedding = head, _ = self.head.packed(), self.embedding.half()
        self._packed_bytes = head.nbytes + self.embedding.nbytes + sum(norm.nbytes for norm in norms)
        for layer in self.layers:  # one at a time: what it was packed from is freed
            assert isinstance(layer.mlp, Mlp)
            layer.qkv, layer.o = qkv, o = layer.qkv.packed(), layer.o.packed()
            layer.mlp = Mlp(gate_up := layer.mlp.gate_up.packed(), down := layer.mlp.down.packed())
            self._packed_bytes += sum(product.nbytes for product in (qkv, o, gate_up, down))
        self.weight_dtype = torch.float16

    def angles(self, position: Tensor, length: Tensor | int | None = None) -> list[Angles]:
        """What each layer's ``rotate`` takes, for tokens at ``position`` [n] of a text of ``length`` tokens."""
        rotated, layers = Angles(*self.rope.cos_sin(position, length)), range(self.config.layers)
        if not self.config.nope_layers:
            return [rotated for _ in layers]
        still = Angles(torch.ones_like(rotated.cos), torch.zeros_like(rotated.sin))
        return [still if index in self.config.nope_layers else rotated for index in layers]

    def split(self, layer: Layer, qkv: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, Hq, D] and k [n, H, D] after norm and RoPE, and v [n, H, D]."""
        c = self.config
        return split_rotate(qkv, layer.qk_norms, c.rms_eps, angles, c.heads, c.kv_heads)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Token ids [n] -> hidden states after the last norm [n, hidden]."""
        eps = self.config.rms_eps
        x, delta, whole = F.embedding(ids, self.embedding).to(self.dtype), None, len(ids) <= MLP_ROWS
        for layer in self.layers:
            h = add_rms_norm(x, delta, layer.input_norm, eps)
            delta = layer.o(attention(layer, layer.qkv(h)))
            h = add_rms_norm(x, delta, layer.mlp_norm, eps)
            delta = layer.mlp(h) if whole else torch.cat([layer.mlp(rows) for rows in h.split(MLP_ROWS)])
        return add_rms_norm(x, delta, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] -> logits [n, vocab], float32 at least."""
        return self.head(hidden).to(torch.promote_types(self.dtype, torch.float32))

    def _parameter(self, shape: tuple[int, ...], name: str) -> Tensor:
        self._destinations[name] = torch.empty(shape, device=self.device, dtype=self.dtype)
        return self._destinations[name]

    def _linear(self, prefix: str, outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        """One product for several named projections; each name gets its rows of it."""
        rows = sum(outputs.values())
        weight = torch.empty(rows, inputs, device=self.device, dtype=self.dtype)
        linear = Linear(weight, torch.empty(rows, device=self.device, dtype=self.dtype) if bias else None)
        start = 0
        for name, size in outputs.items():
            self._destinations[f"{prefix}.{name}.weight"] = weight[start : start + size]
            if linear.bias is not None:
                self._destinations[f"{prefix}.{name}.bias"] = linear.bias[start : start + size]
            start += size
        return linear

    def _mlp(self, prefix: str, intermediate: int) -> Mlp:
        c = self.config
        return Mlp(
            self._linear(prefix, {"gate_proj": intermediate, "up_proj": intermediate}, c.hidden_size, c.mlp_bias),
            self._linear(prefix, {"down_proj": c.hidden_size}, intermediate, c.mlp_bias),
        )

    def _sparse_mlp(self, prefix: str, moe: MoeConfig) -> SparseMlp:
        hidden, size = self.config.hidden_size, moe.intermediate_size
        gate_up = torch.empty(moe.experts, 2 * size, hidden, device=self.device, dtype=self.dtype)
        down = torch.empty(moe.experts, hidden, size, device=self.device, dtype=self.dtype)
        for expert in range(moe.experts):
            name = f"{prefix}.experts.{expert}"
            self._destinations[f"{name}.gate_proj.weight"] = gate_up[expert, :size]
            self._destinations[f"{name}.up_proj.weight"] = gate_up[expert, size:]
            self._destinations[f"{name}.down_proj.weight"] = down[expert]
        router = self._parameter((moe.experts, hidden), f"{prefix}.gate.weight")
        return SparseMlp(router, gate_up, down, moe.experts_per_token, moe.normalize)

    def _layer(self, index: int) -> Layer:
        c, prefix = self.config, f"model.layers.{index}"
        attn = f"{prefix}.self_attn"
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        norms = None
        if c.qk_norm:
            norms = (
                self._parameter((c.head_dim,), f"{attn}.q_norm.weight"),
                self._parameter((c.head_dim,), f"{attn}.k_norm.weight"),
            )
        mlp: Mlp | SparseMlp
        if c.moe is not None and index in c.moe.layers:
            mlp = self._sparse_mlp(f"{prefix}.mlp", c.moe)
        else:
            mlp = self._mlp(f"{prefix}.mlp", c.intermediate_size)
        return Layer(
            index=index,
            input_norm=self._parameter((c.hidden_size,), f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(attn, {"q_proj": q, "k_proj": kv, "v_proj": kv}, c.hidden_size, c.qkv_bias),
            qk_norms=norms,
            o=self._linear(attn, {"o_proj": c.hidden_size}, q, c.o_bias),
            mlp_norm=self._parameter((c.hidden_size,), f"{prefix}.post_attention_layernorm.weight"),
            mlp=mlp,
        )
