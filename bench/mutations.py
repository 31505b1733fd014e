"""Small checkpoints, and the mutations that ``fuzz.py`` applies to them.

A mutation changes one file of a folder in place, as a person, a tool or a disk might, and returns what it did. About
half of the mutations leave a good checkpoint.
"""

from __future__ import annotations

import json
import random
import re
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
# Chat templates as checkpoints have them, in short.
TEMPLATES = [
    """{% for m in messages %}{{ '<think>' + m['role'] + '\n' + m.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<think>assistant\n' }}{% endif %}""",
    """{{ bos_token }}
{%- for message in messages %}
    {%- set name = message.role %}
    {%- if name == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
{{ ' ' ~ message['content'] ~ eos_token -}}
    {%- endif %}
{%- endfor %}
""",
    """{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{% else %}{% set rest = messages %}{% endif %}
{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turns') }}{% endif %}
{% if loop.first and system is defined %}{{ system }}{% endif %}
<s>{{ m.content.strip() }}</s>{% endfor %}""",
    """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{% macro say(m, n=2) %}{{ m.role | upper | tojson }}: {{ (m.content | replace('sky', 'sea')) * n }}{% endmacro %}
{% for m in messages %}
  {% generation %}{{ say(m) }}{% endgeneration %}{{ eos_token if loop.index0 < ns.last }}
{% endfor %}""",
    "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ strftime_now('%Y') }}",
    "{{ messages }}",
    """{% for m in messages %}{% for w in m.content.split(' ') %}{{ loop.cycle('<think>', '') }}{{ w | capitalize }}
{% if w is string and w in ['the', 'is'] %}{% continue %}{% endif %}{{ w[::-1] }}{% endfor %}\r\n{% endfor %}\n\n""",
]
TEMPLATE_WORDS = ["message", "messages", "content", "role", "eos_token", "bos_token", "unk_token", "if", "for", "else"]
TEMPLATE_WORDS += ["set", "loop.last", "'", '"', "%}", "-%}", "{{", "}}", "{#", "\n", "\r\n", "\u2028", "| trim", "[0]"]
TEMPLATE_WORDS += ["{{ 1 / 0 }}", "{{ 'x' * 10**9 }}", "{% for i in range(10**6) %}{% endfor %}", "{{ x }}{{ x.y }}"]
TEMPLATE_WORDS += ["{{ messages.__class__ }}", "{{ messages.append(1) }}", "<think>", "</s>", "{{ true }}{{ none }}"]

PRINTABLE = [chr(code) for code in range(33, 127)]
# Keys of generation_config.json with values of every kind.
GENERATION: dict[str, list[Any]] = {
    "do_sample": [True, True, False, False, False, None, 0, "false"],
    "temperature": [0.6, 1.0, 0, 0.0, None, -1, "0.7"],
    "top_k": [0, 20, 50, 1, None, -1],
    "top_p": [0.9, 1.0, 0, 1.5],
    "min_p": [0.05, None, 2],
    "repetition_penalty": [1.1, 1.0, 2.5, 0.5, 0, -1],
    "max_new_tokens": [1, 3, 5, 2048, None, 0, "9"],
    "min_new_tokens": [0, 1, 4, 10**9, None, -1],
    "max_length": [20, 4096],
    "min_length": [0, 5],
    "suppress_tokens": [[], [5, 17], list(range(0, 300, 2)), list(range(200)), [-1], [10**6], [5.0], "x", 7],
    "begin_suppress_tokens": [[], list(range(0, 300, 2)), list(range(200)), [-1], [[5]], 7],
    "stop_strings": [PRINTABLE, PRINTABLE[::2], ["th", "e", "</s>"], "s", "", [], ["x", 5]],
    "eos_token_id": [None, 2, 3, [1, 2], list(range(0, 260, 3)), [], 10**6, -1, "2", [[3]], 3.0, True],
    "bos_token_id": [None, 7],
    "pad_token_id": [None, 0, -1],
    "bad_words_ids": [None, [[5]], [[5, 17]], []],
    "no_repeat_ngram_size": [0, 1],
    "encoder_repetition_penalty": [1.0, 2.0],
    "sequence_bias": [None, [[[5], 9.0]]],
    "num_beams": [1, 1, 2],
    "num_beam_groups": [1],
    "num_return_sequences": [1, 2],
    "early_stopping": [True, False],
    "length_penalty": [1.0, 2.0],
    "typical_p": [1.0, 0.5],
    "epsilon_cutoff": [0.0, 0.1],
    "penalty_alpha": [None, 0, 0.6],
    "guidance_scale": [None, 1.0, 1.5],
    "forced_eos_token_id": [None, 7],
    "exponential_decay_length_penalty": [None, [1, 1.5]],
    "renormalize_logits": [True, False],
    "remove_invalid_values": [True],
    "return_dict_in_generate": [True],
    "output_scores": [True],
    "use_cache": [True, False],
    "cache_implementation": [None, "dynamic"],
    "prompt_lookup_num_tokens": [None, 3],
    "transformers_version": ["4.40.0"],
    "chat_format": ["chatml"],
    "_from_model_config": [True, False],
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
    config = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 512, "chat_template": TEMPLATES[0]}
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
        specific = "model_specific_special_tokens"
        name, key, value = rng.choice(
            [
                ("tokenizer_config", "added_tokens_decoder", decoder),
                ("tokenizer_config", rng.choice(["extra_special_tokens", "additional_special_tokens"]), tokens),
                (
                    "tokenizer_config",
                    rng.choice(["extra_special_tokens", specific]),
                    {f"{one}_token": one for one in texts},
                ),
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


def mutate_template(rng: random.Random, folder: Path) -> str:
    """Another template, changed or not, in one of the places where one may be."""
    source, told = rng.choice(TEMPLATES), "unchanged"
    if rng.random() < 0.7:
        source, told = change_text(rng, source)
    place = rng.choice(["tokenizer_config.json", "a list", "chat_template.jinja", "chat_template.json"])
    if place == "chat_template.jinja":
        (folder / place).write_text(source)
        return f"{place}, {change_bytes(rng, folder / place) if rng.random() < 0.2 else told}"
    template: Any = source
    if place == "a list":
        names = rng.sample(["default", "tool_use", "rag"], rng.randrange(1, 4))
        template = [{"name": name, "template": source if name == "default" else "{{ 1 }}"} for name in names]
    path = folder / (place if place == "chat_template.json" else "tokenizer_config.json")
    config = json.loads(path.read_text()) if path.exists() else {}
    config["chat_template"] = template
    if rng.random() < 0.2:
        told = change_json(rng, config)
    path.write_text(json.dumps(config))
    return f"{place}, {told}"


def mutate_generation(rng: random.Random, folder: Path) -> str:
    """Some keys of generation_config.json, most with values that are accepted; damage some."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) if rng.random() < 0.5 else {}
    config |= {key: rng.choice(GENERATION[key]) for key in rng.sample(list(GENERATION), rng.randrange(1, 5))}
    told = json.dumps(config)
    if rng.random() < 0.2:
        told = change_json(rng, config)
    path.write_text(json.dumps(config))
    return change_bytes(rng, path) if rng.random() < 0.1 else f"generation {told[:300]}"


def named(rng: random.Random, text: str) -> dict[str, Any]:
    flags = {flag: rng.random() < 0.3 for flag in ("lstrip", "normalized", "rstrip", "single_word")}
    return {"__type": "AddedToken", "content": text, "special": rng.random() < 0.7, **flags}


MUTATIONS: dict[str, Callable[[random.Random, Path], str]] = {
    "config": mutate_config,
    "index": mutate_index,
    "header": mutate_header,
    "tokenizer": mutate_tokenizer,
    "special tokens": mutate_special_tokens,
    "template": mutate_template,
    "generation": mutate_generation,
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


def change_text(rng: random.Random, text: str) -> tuple[str, str]:
    """The text with a part taken out, doubled, moved or replaced by a word; and what was done."""
    start = rng.randrange(len(text) + 1)
    end = start + rng.randrange(1, 30)
    part, where = text[start:end], rng.randrange(len(text) + 1)
    what = rng.choice(["delete", "double", "move", "word", "word", "insert"])
    if what == "delete":
        text = text[:start] + text[end:]
    elif what == "double":
        text = text[:end] + text[start:]
    elif what == "move":
        rest = text[:start] + text[end:]
        text = rest[:where] + part + rest[where:]
    elif what == "word":
        words = re.split(r"(\W+)", text)
        words[rng.randrange(len(words))] = part = rng.choice(TEMPLATE_WORDS)
        text = "".join(words)
    else:
        part = rng.choice(TEMPLATE_WORDS)
        text = text[:start] + part + text[start:]
    return text, f"{what} {part!r} at {start}"


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
