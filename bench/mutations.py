"""Small checkpoints, and the mutations that ``fuzz.py`` applies to them.

A mutation changes one file of a folder in place, as a person, a tool or a disk might, and returns what it did. About
half of the mutations leave a good checkpoint.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"

# Values of every kind that a person or a tool might write by mistake.
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 48, 64, 2**31, 2**63, 10**30, 0.0, 0.5, 1.0, 1e-6, 1e300]
VALUES += [-1.5, float("nan"), float("inf"), "", "x", "silu", "yarn", "\ud800", [], [1], ["a"], [[]], {}, {"a": 1}]
PATHS = ["../outside.safetensors", "/outside.safetensors", "a/../outside.safetensors", "..", "", "model.safetensors\0"]


PLAUSIBLE: dict[str, list[Any]] = {
    "use_cache": [True, False],
    "initializer_range": [0.01],
    "attention_dropout": [0.1],
    "bos_token_id": [None, 7],
    "eos_token_id": [None, 3, [1, 2], -1],
    "pad_token_id": [0],
    "_name_or_path": ["a/b"],
    "dtype": ["bfloat16", "int8"],
    "transformers_version": ["4.40.0"],
    "unsloth_version": ["1"],
    "rms_norm_eps": [1e-5, 1e-3, 0.1],
    "max_position_embeddings": [64, 4096],
    "sliding_window": [None, None, 8],
    "use_sliding_window": [False, True],
    "max_window_layers": [0, 2],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    "hidden_act": ["silu", "gelu"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_mrope": [False],
    "tie_word_embeddings": [True, False],
    "norm_topk_prob": [True, False],
    "num_experts_per_tok": [1, 3, 4, 5],
    "mlp_only_layers": [[], [0]],
    "decoder_sparse_step": [1, 2],
    "no_rope_layers": [[1, 0], [1, 1], [0, 0], [1]],
    "quantization_config": [{"quant_method": "awq"}, None],
    "architectures": [None, ["LlamaForCausalLM"]],
    "head_dim": [None, 8, 16],
    "num_key_value_heads": [None, 1, 2, 4],
    "model_type": ["llama", "mistral", "qwen2", "gpt2"],
    "partial_rotary_factor": [1.0, 0.5],
    "rope_theta": [10000.0, 5e5],
    "future_key": [None, False, 1],
}


def make_bases(folder: Path) -> list[Path]:
    """A folder for each family with random parameters and a byte-level tokenizer; the first four are sharded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": None,
    }  # fmt: skip
    families: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {"sliding_window": None, "head_dim": 12}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("smollm3", {"no_rope_layer_interval": 2}),
    ]
    bases = []
    for number, (family, keys) in enumerate(families):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | keys))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 0.5, 0.3) if parameter.dim() == 1 else parameter.data.mul_(5)
        base = folder / family
        model.save_pretrained(base, max_shard_size="25KB" if number < 4 else "1GB")
        save_tokenizer(base)
        bases.append(base)
    return bases


def save_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("Ġ", "s"), ("th", "e"), ("s", "k")]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 512, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def mutate_config(rng: random.Random, folder: Path) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change = rng.choice(
        [change_json, change_json, change_known_key, change_known_key, change_rope, change_layout, None]
    )
    if change is None:
        return change_bytes(rng, path)
    told = change(rng, config)
    path.write_text(json.dumps(config))
    return told


def mutate_index(rng: random.Random, folder: Path) -> str:
    path = folder / INDEX
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    name, shard = rng.choice(list(weight_map)), rng.choice(list(weight_map.values()))
    what = rng.choice(["escape", "drop", "move", "name", "bytes", "no shard", "shuffle", "metadata", "json"])
    if what == "escape":
        # The file that the name leads to is a good shard: only the name is wrong.
        shutil.copy(folder / weight_map[name], folder.parent / "outside.safetensors")
        weight_map[name] = rng.choice(PATHS)
    elif what == "drop":
        del weight_map[name]
    elif what == "move":
        weight_map[name] = shard
    elif what == "name":
        weight_map[name + rng.choice(["", ".extra", "s"])] = shard
    elif what == "bytes":
        return change_bytes(rng, path)
    elif what == "no shard":
        (folder / shard).unlink()
    elif what == "shuffle":
        index["weight_map"] = dict(rng.sample(list(weight_map.items()), len(weight_map)))
    elif what == "metadata":
        index["metadata"] = rng.choice(VALUES)
    else:
        change_json(rng, index)
    path.write_text(json.dumps(index))
    return f"index, {what} at {name}"


def mutate_header(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    what = rng.choice(
        [
            "dtype",
            "shape",
            "offsets",
            "rename",
            "drop",
            "metadata",
            "json",
            "shuffle",
            "shuffle",
            "weights",
            "length",
            "cut",
        ]
    )
    entry = header[name]
    if what == "dtype":
        entry["dtype"] = rng.choice(["F32", "F16", "BF16", "F64", "I32", "F8_E4M3", "U8", "X", 7, None])
    elif what == "shape":
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [], [-1], [2**62, 4], "x"]
        )
    elif what == "offsets":
        entry["data_offsets"] = [offset + rng.choice([-4, 0, 4, 2**40]) for offset in entry["data_offsets"]]
    elif what == "rename":
        header[rng.choice([*names, name + "s", "model.layers.0.self_attn.rotary_emb.inv_freq"])] = header.pop(name)
    elif what == "drop":
        del header[name]
    elif what == "metadata":
        header["__metadata__"] = rng.choice(
            [{"format": "pt", "note": "x"}, {"format": "np"}, {}, {"a": 1}, "x", {"format": "mlx"}]
        )
    elif what == "json":
        change_json(rng, header)
    elif what == "shuffle":
        header = dict(rng.sample(list(header.items()), len(header)))
    elif what == "weights":
        # The low bytes of float32 numbers change the weights and make no infinities.
        for _ in range(50):
            body[rng.randrange(len(body) // 4) * 4 + rng.randrange(2)] = rng.randrange(256)
    text = json.dumps(header).encode() + b" " * rng.choice([0, 1, 8, 100])
    length = (
        len(text) if what != "length" else rng.choice([0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1])
    )
    data = bytearray(length.to_bytes(8, "little") + text + body)
    if what == "cut":
        data = data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + b"\0" * 4
    path.write_bytes(data)
    return f"header, {what} of {path.name} at {name}"


def mutate_tokenizer(rng: random.Random, folder: Path) -> str:
    path = folder / rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    if rng.random() < 0.1:
        path = folder / rng.choice(["chat_template.jinja", "chat_template.json", "added_tokens.json"])
    value = json.loads(path.read_text()) if path.exists() else {"eos_token": "</s>", "unk_token": "x"}
    told = change_json(rng, value)
    path.write_text(json.dumps(value))
    if rng.random() < 0.25:
        return change_bytes(rng, path)
    return f"{path.name}: {told}"


def mutate_special_tokens(rng: random.Random, folder: Path) -> str:
    """Name tokens, most of which tokenizer.json lacks, in one or two of the files that may; damage some."""
    size = 264  # of the tokenizer that save_tokenizer makes
    told = []
    for _ in range(rng.choice([1, 1, 2])):
        texts = rng.sample(["<x>", "<y>", "<|im_end|>", "</s>", "<think>", "Why", "s"], rng.randrange(1, 4))
        tokens: list[Any] = [rng.choice([text, named(rng, text)]) for text in texts]
        decoder = {str(size + i): named(rng, text) for i, text in enumerate(texts)}
        name, key, value = rng.choice(
            [
                ("tokenizer_config", "added_tokens_decoder", decoder),
                ("tokenizer_config", rng.choice(["extra_special_tokens", "additional_special_tokens"]), tokens),
                ("tokenizer_config", "extra_special_tokens", {f"{text}_token": text for text in texts}),
                ("tokenizer_config", rng.choice(["eos_token", "pad_token", "image_token", "a_token"]), tokens[0]),
                ("special_tokens_map", rng.choice(["eos_token", "unk_token", "image_token"]), tokens[0]),
                ("special_tokens_map", rng.choice(["extra_special_tokens", "additional_special_tokens"]), texts),
                *(("added_tokens", text, size + i) for i, text in enumerate(texts[:1])),
            ]
        )
        path = folder / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        content[key] = value
        told.append(f"{name}.{key}" + (f" ({change_json(rng, content)})" if rng.random() < 0.5 else ""))
        path.write_text(json.dumps(content))
    return ", ".join(told)


def named(rng: random.Random, text: str) -> dict[str, Any]:
    flags = {flag: rng.random() < 0.3 for flag in ("lstrip", "normalized", "rstrip", "single_word")}
    return {"__type": "AddedToken", "content": text, "special": rng.random() < 0.7, **flags}


MUTATIONS: dict[str, Callable[[random.Random, Path], str]] = {
    "config": mutate_config,
    "index": mutate_index,
    "header": mutate_header,
    "tokenizer": mutate_tokenizer,
    "special tokens": mutate_special_tokens,
}


def change_json(rng: random.Random, value: Any) -> str:
    """Change one place at any depth: replace, delete, rename, swap, or change a number a little."""
    path = ""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        path += f".{key}"
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.3:
            break
        value = value[key]
    what, old = rng.choice(["value", "value", "delete", "rename", "nudge", "swap"]), value[key]
    if what == "delete":
        del value[key]
    elif what == "rename" and isinstance(value, dict):
        value[rng.choice([f"{key}s", str(key).upper(), "x" * 3000])] = value.pop(key)
    elif what == "nudge" and isinstance(old, int | float) and not isinstance(old, bool):
        value[key] = rng.choice([old + 1, old - 1, old * 2, -old, old / 2, str(old), [old]])
    elif what == "swap":
        other = rng.choice(keys)
        value[key], value[other] = value[other], value[key]
    else:
        value[key] = rng.choice(VALUES)
    return f"{what} at {path}"


def change_known_key(rng: random.Random, config: dict[str, Any]) -> str:
    """Set a known key to a plausible value; most of these load."""
    key = rng.choice(list(PLAUSIBLE))
    config[key] = rng.choice(PLAUSIBLE[key])
    return f"{key} = {config[key]}"


def change_rope(rng: random.Random, config: dict[str, Any]) -> str:
    kind = rng.choice(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([1e4, 1e6])}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 8.5])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 2.0, 1.0])}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = rng.choice([8, 64, 512])
    if kind == "yarn":
        rope |= rng.choice([{}, {"truncate": False}, {"beta_fast": 4, "beta_slow": 2}, {"attention_factor": 0.8}])
    config.pop("rope_parameters")
    if rng.random() < 0.3:
        rope.pop(rng.choice(list(rope)))
    config[rng.choice(["rope_parameters", "rope_scaling"])] = rope
    return f"rope {rope}"


def change_layout(rng: random.Random, config: dict[str, Any]) -> str:
    """Rewrite the configuration in the layout of transformers 4."""
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    return f"layout 4, {change_known_key(rng, config)}"


def change_bytes(rng: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    where = rng.randrange(len(data) + 1)
    what = rng.randrange(5)
    if what == 0:
        data = data[:where]
    elif what == 1:
        data[where:where] = rng.choice([b"\xff", b"\0", b"\n", b"{", b"[" * 5000, b"1" * 5000, "\ufeff".encode(), b" "])
    elif what == 2:
        data[where : where + 1] = bytes([rng.randrange(256)])
    elif what == 3:
        data[where : where + rng.randrange(1, 40)] = b""
    else:
        data = data + rng.choice([b"\n", b"  ", b"\n\n"])
    path.write_bytes(data)
    return f"bytes {what} at {where} of {path.name}"
