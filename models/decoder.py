"""One decoder for every family: flags in ``ModelConfig``, not a file a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.kernels.blocks import blocks
from ringkv.kernels.rotate import Angles, split_rotate
from ringkv.kernels.table import add_rms_norm, silu_mul
from ringkv.models.config import ModelConfig, MoeConfig
from ringkv.models.digest import digest, mark
from ringkv.models.linear import AnyLinear, Linear, PackedLinear
from ringkv.models.moe import SparseMlp
from ringkv.models.rope import Rope

# Rows of a long prompt that go through a product or an MLP at once: bounds the activations of an MLP, which are the
# widest tensors of a prefill, and how long a prefill goes on without a pause.
ROWS = 1024
# Where a checkpoint keeps the rows of the tokens, and the product that gives their logits.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
# Called with the name of a tensor of a checkpoint and the view to fill with it.
Read = Callable[[str, Tensor], object]


class Decoder:
    """A Llama-family decoder: parameters, and the arithmetic around an attention that the caller supplies.

    Args:
        config: what to build.
        device, dtype: where the parameters live and what they are; also the type of the activations.
        packed: keep the weights of the products, and the embedding, in float16, and all else in ``dtype``. This is for
            float32 on a CPU where ``can_pack()``, and not for a mixture of experts.

    Attributes:
        weight_dtype: what the weights are kept in: ``dtype``, or float16 where they are packed.
        torn: a ``fill`` was left by an exception, so that some parameters are new and others are not.

    The parameters are allocated, not set: ``fill`` sets them, or whoever writes to the views of ``destinations``.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, packed: bool = False) -> None:
        if packed and (dtype != torch.float32 or config.moe is not None):
            raise ValueError("only a dense decoder in float32 can be packed")
        self.config, self.device, self.dtype = config, device, dtype
        self.weight_dtype = torch.float16 if packed else dtype
        self.torn = False
        self._parameters: dict[str, Tensor] = {}
        self._experts: dict[str, tuple[Tensor, Tensor]] = {}  # gate and up, and down, of all experts of an MLP
        # Products that are packed, the head first, with the rows that each name has of them.
        self._packed: list[tuple[PackedLinear, Mapping[str, int]]] = []
        self._marks: dict[str, bytes] = {}  # of what was read, for the digest: packing loses the numbers
        self._digest: str | None = None
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings, device)
        self.embedding = self._parameter(EMBEDDING, config.vocab_size, config.hidden_size, dtype=self.weight_dtype)
        self.head: AnyLinear
        if config.tie_embeddings and not packed:
            self.head = Linear(self.embedding)
        else:
            name = EMBEDDING if config.tie_embeddings else HEAD
            self.head = self._linear({name.removesuffix(".weight"): config.vocab_size}, config.hidden_size, False)
        self.layers = [self._layer(index) for index in range(config.layers)]
        self.norm = self._parameter("model.norm.weight", config.hidden_size)

    def destinations(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold, by name, with the view that it fills.

        Weights that are packed have no view to fill: theirs is on the meta device, and has nothing but its shape.
        """
        unset: dict[str, Tensor] = {}
        for linear, outputs in self._packed:
            unset |= _rows(torch.empty(linear.shape, device="meta"), outputs, "weight")
        return unset | dict(self._views())

    def fill(self, read: Read) -> None:
        """Set every parameter in place, at first or anew.

        Products that are packed are read one at a time, in ``dtype``, and packed at once.

        Args:
            read: fills the view that it is given with the tensor of this name.
        """
        self.torn = True
        self._marks, self._digest = {}, None

        def read_and_mark(name: str, view: Tensor) -> None:
            read(name, view)
            if not view.is_meta:
                self._marks[name] = mark(view)

        with torch.no_grad():
            for name, view in self._views():
                read_and_mark(name, view)
            # The head comes first and has memory of its own to be read into: it is far larger than the others, and
            # there must be room for it twice.
            for products in (self._packed[:1], self._packed[1:]):
                self._pack(products, read_and_mark)
        self.torn = False

    @property
    def digest(self) -> str:
        """Which model this is; see ``ringkv.models.digest``. The weights are looked at once each time they are set."""
        if self._digest is None:
            marks = self._marks or {name: mark(view) for name, view in self._views()}
            self._digest = digest(self.config, marks)
        return self._digest

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        """What is read in place. There may be very many experts, so theirs are named only when they are wanted."""
        yield from self._parameters.items()
        for prefix, (gate_up, down) in self._experts.items():
            for expert in range(len(down)):
                name, size = f"{prefix}.experts.{expert}", down.shape[2]
                yield from _rows(
                    gate_up[expert], {f"{name}.gate_proj": size, f"{name}.up_proj": size}, "weight"
                ).items()
                yield f"{name}.down_proj.weight", down[expert]

    def _pack(self, products: Sequence[tuple[PackedLinear, Mapping[str, int]]], read: Read) -> None:
        """Read products and pack them, each through the same memory: nothing is left between those that are packed."""
        unpacked = self._empty(max((linear.shape.numel() for linear, _ in products), default=0))
        for linear, outputs in products:
            weight = unpacked[: linear.shape.numel()].view(linear.shape)
            for name, view in _rows(weight, outputs, "weight").items():
                if name in self._parameters:  # a tied head is the embedding
                    view.copy_(self._parameters[name])
                else:
                    read(name, view)
            linear.pack(weight)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters that are held; products that are packed count once they are filled.

        A packed decoder holds a tied embedding twice, as rows and as a product.
        """
        tensors = [*self._parameters.values(), *chain.from_iterable(self._experts.values())]
        return sum(x.nbytes for x in tensors) + sum(linear.nbytes for linear, _ in self._packed)

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
        x, delta = F.embedding(ids, self.embedding).to(self.dtype), None
        for layer in self.layers:
            h = add_rms_norm(x, delta, layer.input_norm, eps)
            delta = _in_blocks(layer.o, attention(layer, _in_blocks(layer.qkv, h)))
            h = add_rms_norm(x, delta, layer.mlp_norm, eps)
            delta = _in_blocks(layer.mlp, h)
        return add_rms_norm(x, delta, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] -> logits [n, vocab], float32 at least."""
        return self.head(hidden).to(torch.promote_types(self.dtype, torch.float32))

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def _parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self._parameters[name] = self._empty(*shape, dtype=dtype)
        return self._parameters[name]

    def _linear(self, outputs: Mapping[str, int], inputs: int, bias: bool) -> AnyLinear:
        """One product for several named projections; each name gets its rows of it."""
        rows = sum(outputs.values())
        shift = self._empty(rows) if bias else None
        if shift is not None:
            self._parameters |= _rows(shift, outputs, "bias")
        if self.weight_dtype != self.dtype:
            packed = PackedLinear((rows, inputs), shift)
            self._packed.append((packed, outputs))
            return packed
        linear = Linear(self._empty(rows, inputs), shift)
        self._parameters |= _rows(linear.weight, outputs, "weight")
        return linear

    def _mlp(self, prefix: str, intermediate: int) -> Mlp:
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        gate_up = {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}
        down = {f"{prefix}.down_proj": hidden}
        return Mlp(self._linear(gate_up, hidden, bias), self._linear(down, intermediate, bias))

    def _sparse_mlp(self, prefix: str, moe: MoeConfig) -> SparseMlp:
        hidden, size = self.config.hidden_size, moe.intermediate_size
        gate_up, down = self._empty(moe.experts, 2 * size, hidden), self._empty(moe.experts, hidden, size)
        self._experts[prefix] = gate_up, down
        router = self._parameter(f"{prefix}.gate.weight", moe.experts, hidden)
        return SparseMlp(router, gate_up, down, moe.experts_per_token, moe.normalize)

    def _layer(self, index: int) -> Layer:
        c, prefix = self.config, f"model.layers.{index}"
        attn = f"{prefix}.self_attn"
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}
        q_norm, k_norm = (f"{attn}.{x}_norm.weight" for x in "qk")
        norms = (self._parameter(q_norm, c.head_dim), self._parameter(k_norm, c.head_dim)) if c.qk_norm else None
        mlp: Mlp | SparseMlp
        if c.moe is not None and index in c.moe.layers:
            mlp = self._sparse_mlp(f"{prefix}.mlp", c.moe)
        else:
            mlp = self._mlp(f"{prefix}.mlp", c.intermediate_size)
        return Layer(
            index=index,
            input_norm=self._parameter(f"{prefix}.input_layernorm.weight", c.hidden_size),
            qkv=self._linear(qkv, c.hidden_size, c.qkv_bias),
            qk_norms=norms,
            o=self._linear({f"{attn}.o_proj": c.hidden_size}, q, c.o_bias),
            mlp_norm=self._parameter(f"{prefix}.post_attention_layernorm.weight", c.hidden_size),
            mlp=mlp,
        )


def _in_blocks(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x), whose rows depend on those of x alone, computed in blocks of rows."""
    if len(x) <= ROWS:
        return f(x)
    out = None
    for start in blocks(len(x), ROWS, x):
        part = f(x[start : start + ROWS])
        out = part.new_empty(len(x), part.shape[1]) if out is None else out
        out[start : start + ROWS] = part
    assert out is not None
    return out


def _rows(x: Tensor, outputs: Mapping[str, int], kind: str) -> dict[str, Tensor]:
    """The rows of a product's weight or bias that belong to each name."""
    views, start = {}, 0
    for name, size in outputs.items():
        views[f"{name}.{kind}"] = x[start : start + size]
        start += size
    return views
