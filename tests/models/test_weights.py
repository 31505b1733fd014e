"""Loading: what transformers saves gives transformers' logits; what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.checkpoints.state_dict import StateDictCheckpoint
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.linear import can_pack
from ringkv.models.weights import load_decoder, load_weights

CPU = torch.device("cpu")
VOCAB = 160
PROMPTS = [torch.arange(n) * 31 % VOCAB for n in (1, 7, 100)]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}}),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 50},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.5}),
    "mistral": ("mistral", {}),
    "mistral-head-dim": ("mistral", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
    "qwen2-window-nowhere": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-full-layers": ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-normalized": ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3_moe-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen3_moe-mlp-only": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe-all-dense": ("qwen3_moe", {"mlp_only_layers": [0, 1], "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-interval": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "smollm3-layers": ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True}),
}  # fmt: skip


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint, to be damaged."""

    def copy(family: str = "llama", **options: Any) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family, **options), tmp_path / "checkpoint"))

    return copy


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys; None deletes."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_checkpoint(folder), CPU, dtype)


def assert_equal_logits(
    decoder: Decoder, folder: Path, ours: Callable[..., Tensor], theirs: Callable[..., Tensor]
) -> None:
    for ids in PROMPTS:
        wanted = theirs(folder, ids)
        assert (ours(decoder, ids) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("layout", [5, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(
    variant: str,
    layout: int,
    tiny_checkpoint: Callable[..., Path],
    our_logits: Callable[..., Tensor],
    their_logits: Callable[..., Tensor],
) -> None:
    family, config = VARIANTS[variant]
    saved = tiny_checkpoint(family, shards=layout == 4, layout=layout, **config)
    assert len(list(saved.glob("*.safetensors"))) == 1 if layout == 5 else len(list(saved.glob("*.safetensors"))) > 2
    decoder = load(saved)
    assert_equal_logits(decoder, saved, our_logits, their_logits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_stored_types_convert_exactly(dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    saved = tiny_checkpoint("qwen2", dtype=dtype)
    checkpoint = open_checkpoint(saved)
    assert ModelConfig.from_hf(checkpoint.config).dtype == dtype
    stored = load_file(saved / "model.safetensors")
    destinations = load_decoder(checkpoint, CPU, torch.float32).destinations()
    for name, view in destinations.items():
        assert torch.equal(view, stored[name].to(torch.float32)), name


def test_every_parameter_is_set_once(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tiny_checkpoint("qwen3_moe", attention_bias=True)
    checkpoint = StateDictCheckpoint(load_file(saved / "model.safetensors"), open_checkpoint(saved).config)
    decoder = Decoder(ModelConfig.from_hf(checkpoint.config), CPU, torch.float32)
    for view in decoder.destinations().values():
        view.fill_(float("nan"))
    reads: list[str] = []
    read = checkpoint.read

    def counted(name: str, out: Tensor) -> None:
        reads.append(name)
        read(name, out)

    monkeypatch.setattr(checkpoint, "read", counted)
    load_weights(decoder, checkpoint)
    assert sorted(reads) == sorted(decoder.destinations())
    assert all(view.isfinite().all() for view in decoder.destinations().values())
    # The views cover distinct memory, and all of the fused tensors.
    layer = decoder.layers[0]
    assert layer.qkv.weight.isfinite().all()
    assert len({view.data_ptr() for view in decoder.destinations().values()}) == len(reads)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_a_packed_decoder_is_read_once(tied: bool, tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2", tie_word_embeddings=tied))
    decoder = Decoder(ModelConfig.from_hf(checkpoint.config), CPU, torch.float32, packed=True)
    read: list[str] = []
    decoder.fill(lambda name, view: read.append(name))
    assert sorted(read) == sorted(decoder.destinations()) == sorted(checkpoint.shapes())
    assert {name: tuple(view.shape) for name, view in decoder.destinations().items()} == checkpoint.shapes()


def test_a_large_tensor_is_read_in_blocks(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder()
    whole = load(path).destinations()
    monkeypatch.setattr("ringkv.models.checkpoints.folder._BLOCK_BYTES", 1000)
    monkeypatch.setattr("ringkv.models.checkpoints.folder._MAPPED_BYTES", 5000)
    for name, view in load(path).destinations().items():
        assert torch.equal(view, whole[name])


def test_the_dtype_comes_from_the_tensors_where_the_configuration_is_silent(folder: Callable[..., Path]) -> None:
    path = folder("llama", dtype="bfloat16")
    edit_json(path / "config.json", dtype=None)
    assert ModelConfig.from_hf(open_checkpoint(path).config).dtype == "bfloat16"


def test_tied_with_an_equal_head(folder: Callable[..., Path], our_logits: Any, their_logits: Any) -> None:
    path = folder("llama", tie_word_embeddings=True)
    edit_tensors(
        path / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert_equal_logits(load(path), path, our_logits, their_logits)


def test_tied_with_another_head_is_refused(folder: Callable[..., Path]) -> None:
    path = folder("llama", tie_word_embeddings=True)
    edit_tensors(path / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(RingkvError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        load(path)


def test_untied_without_a_head_is_refused(folder: Callable[..., Path]) -> None:
    path = folder("llama", tie_word_embeddings=True)
    edit_json(path / "config.json", tie_word_embeddings=False)
    with pytest.raises(RingkvError, match=r"missing: lm_head\.weight$"):
        load(path)


def test_missing_unexpected_and_misshapen_tensors_are_listed(folder: Callable[..., Path]) -> None:
    path = folder("llama")

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.norm.weight"] = torch.ones(7)

    edit_tensors(path / "model.safetensors", damage)
    with pytest.raises(RingkvError) as raised:
        load(path)
    message = str(raised.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "unexpected: model.layers.1.mlp.extra.weight;" in message
    assert message.endswith("wrong shape: model.norm.weight [7] instead of [48]")
    assert "\n" not in message


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Callable[..., Path]) -> None:
    path = folder("llama")
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    edit_tensors(path / "model.safetensors", lambda t: t.update({name: torch.ones(6) for name in names}))
    assert set(names).isdisjoint(load(path).destinations())


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"vocab_size": 161}, {"num_key_value_heads": 4}]
)
def test_a_configuration_of_another_size_is_refused(change: dict[str, Any], folder: Callable[..., Path]) -> None:
    path = folder("llama")
    edit_json(path / "config.json", **change)
    with pytest.raises(RingkvError, match="do not fit the configuration"):
        load(path)


def test_a_configuration_far_too_large_takes_no_memory(folder: Callable[..., Path]) -> None:
    path = folder("qwen3_moe")
    edit_json(path / "config.json", num_local_experts=1_000)
    with pytest.raises(RingkvError, match="too few for num_hidden_layers = 2 with 2000 experts"):
        load(path)
    edit_json(path / "config.json", num_local_experts=6, vocab_size=1 << 24, hidden_size=1 << 20)
    with pytest.raises(RingkvError, match="wrong shape"):
        load(path)


@pytest.mark.parametrize("stored", [torch.int64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_tensor_of_another_type_is_refused(stored: torch.dtype, folder: Callable[..., Path]) -> None:
    path = folder("llama")
    edit_tensors(
        path / "model.safetensors", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(stored)})
    )
    with pytest.raises(RingkvError, match=r"model\.safetensors: tensor 'model\.norm\.weight' is "):
        open_checkpoint(path)


def test_shards_that_disagree_with_the_index_are_refused(folder: Callable[..., Path]) -> None:
    path = folder("llama", shards=True)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    shards = Counter(weight_map.values()).most_common()
    full, other = shards[0][0], shards[-1][0]
    name = next(name for name, shard in weight_map.items() if shard == full)

    def refused(message: str, **changes: str | None) -> None:
        edited = {key: value for key, value in (weight_map | changes).items() if value is not None}
        edit_json(path / "model.safetensors.index.json", weight_map=edited)
        with pytest.raises(RingkvError, match=message):
            open_checkpoint(path)

    refused(f"{full}: holds tensor '{name}', but .* does not name it", **{name: None})
    refused(f"{full}: holds tensor '{name}', but .* puts it into {other}", **{name: other})
    refused(f"{full}: tensor 'model.extra' is missing", **{"model.extra": full})
    refused(r"model-9\.safetensors: this shard is missing", **{"model.extra": "model-9.safetensors"})


@pytest.mark.parametrize(
    "shard",
    [f"{prefix}model.safetensors" for prefix in ("../", "/etc/", "sub/", "a\\", "a\n", "a\0", "m" * 300, "형" * 90)]
    + [
        "..",
        "",
        ".safetensors",
        "..safetensors",
        "[a].safetensors",
        "\ud800.safetensors",
        "model.bin",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_a_shard_name_that_leaves_the_folder_is_refused(shard: Any, folder: Callable[..., Path]) -> None:
    path = folder("llama", shards=True)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    edit_json(path / "model.safetensors.index.json", weight_map=index["weight_map"] | {"model.norm.weight": shard})
    with pytest.raises(RingkvError, match=r"index\.json: shard ") as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(index: Any, folder: Callable[..., Path]) -> None:
    path = folder("llama", shards=True)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RingkvError, match=r"model\.safetensors\.index\.json: "):
        open_checkpoint(path)


def test_a_missing_shard_is_named(folder: Callable[..., Path]) -> None:
    path = folder("llama", shards=True)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(RingkvError, match=f"{shard.name}: this shard is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["model-00099-of-00099.safetensors", "model.safetensors", "adapter_model.safetensors"])
def test_a_shard_too_many_is_named(name: str, folder: Callable[..., Path]) -> None:
    path = folder("llama", shards=True)
    save_file({"x": torch.ones(1)}, path / name)
    with pytest.raises(RingkvError, match=f"{name}: is not part of the checkpoint"):
        open_checkpoint(path)


def test_mistrals_second_copy_is_left_alone(folder: Callable[..., Path]) -> None:
    path = folder("mistral")
    save_file({"x": torch.ones(1)}, path / "consolidated.safetensors")
    load(path)
    assert "x" not in open_checkpoint(path).shapes()


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_shard_cut_short_is_named(keep: int, folder: Callable[..., Path]) -> None:
    path = folder("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RingkvError, match=r"model\.safetensors: damaged, cut short or not safetensors"):
        open_checkpoint(path.parent)


def test_pickles_are_never_opened(folder: Callable[..., Path]) -> None:
    path = folder("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(RingkvError, match=r"found pytorch_model\.bin: pickle files are never opened"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{} x", "\ufeff{}", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "null"]
)
def test_a_broken_configuration_file_is_refused_in_one_line(text: str, folder: Callable[..., Path]) -> None:
    path = folder("llama")
    (path / "config.json").write_text(text)
    with pytest.raises(RingkvError, match=r"config\.json: ") as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_refused(folder: Callable[..., Path]) -> None:
    path = folder("llama")
    (path / "generation_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RingkvError, match=r"generation_config\.json: not valid JSON"):
        open_checkpoint(path)
    (path / "config.json").unlink()
    with pytest.raises(RingkvError, match=r"config\.json: there is no such file"):
        open_checkpoint(path)


def to_fp8(path: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Quantise the projections of a checkpoint in place, block-wise; return the dequantised tensors."""
    tensors, dense = load_file(path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        dense[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
        quantised, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        dense[name] = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                where = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scales[i, j] = weight[where].abs().max() / 448
                quantised[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
                dense[name][where] = quantised[where].to(torch.float32) * scales[i, j]
        tensors[name], tensors[name + "_scale_inv"] = quantised, scales
    save_file(tensors, path / "model.safetensors")
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    edit_json(path / "config.json", quantization_config=quantisation)
    return dense


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("block_bytes", [100, 8 << 20])
def test_fp8_is_dequantised(
    family: str, block_bytes: int, folder: Callable[..., Path], our_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringkv.models.checkpoints.folder._BLOCK_BYTES", block_bytes)
    path = folder(family)
    plain = load(path)
    dense = to_fp8(path, (32, 20))
    decoder = load(path)
    for name, view in decoder.destinations().items():
        assert torch.equal(view, dense[name]), name
    logits = our_logits(decoder, PROMPTS[2])
    assert 0 < (logits - our_logits(plain, PROMPTS[2])).abs().max() < 0.5 * logits.abs().max()


def test_fp8_that_is_incomplete_is_refused(folder: Callable[..., Path]) -> None:
    path = folder("qwen3")
    to_fp8(path, (32, 20))
    name = "model.layers.0.mlp.up_proj.weight"
    stored = (path / "model.safetensors").read_bytes()

    def refused(message: str, change: Callable[[dict[str, Tensor]], object]) -> None:
        (path / "model.safetensors").write_bytes(stored)
        edit_tensors(path / "model.safetensors", change)
        with pytest.raises(RingkvError, match=message):
            open_checkpoint(path)

    refused(f"'{name}' is F8_E4M3 without a tensor '{name}_scale_inv'", lambda t: t.pop(name + "_scale_inv"))
    refused(
        f"'{name}_scale_inv' is F32 .*accepted is a float", lambda t: t.update({name + "_scale_inv": torch.ones(1, 1)})
    )
    refused(f"'{name}_scale_inv' is the scale of no FP8", lambda t: t.update({name: t[name].to(torch.float32)}))
    (path / "model.safetensors").write_bytes(stored)
    edit_json(path / "config.json", quantization_config=None)
    with pytest.raises(RingkvError, match=r"is F8_E4M3, but config\.json has no quantization_config"):
        open_checkpoint(path)


def test_weights_from_memory_and_in_place(tiny_checkpoint: Callable[..., Path], our_logits: Any) -> None:
    first, second = (open_checkpoint(tiny_checkpoint("qwen2", seed=seed)) for seed in (0, 1))
    decoder, other = (load_decoder(one, CPU, torch.float32) for one in (first, second))
    before, addresses = our_logits(decoder, PROMPTS[1]), [v.data_ptr() for v in decoder.destinations().values()]
    tensors = {name: view.clone().requires_grad_() for name, view in other.destinations().items()}

    broken = dict(tensors) | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(RingkvError, match=r"state dict: the tensors do not fit .*wrong shape: model\.norm\.weight"):
        load_weights(decoder, StateDictCheckpoint(broken, decoder.config))
    assert torch.equal(our_logits(decoder, PROMPTS[1]), before)

    load_weights(decoder, StateDictCheckpoint(tensors, decoder.config))
    assert torch.equal(our_logits(decoder, PROMPTS[1]), our_logits(other, PROMPTS[1]))
    assert [v.data_ptr() for v in decoder.destinations().values()] == addresses
    assert not any(view.requires_grad for view in decoder.destinations().values())


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2", "qwen3_moe", "smollm3"])
def test_weights_from_a_model_of_transformers(
    variant: str, tiny_checkpoint: Callable[..., Path], our_logits: Any, their_logits: Any
) -> None:
    from transformers import AutoModelForCausalLM

    family, config = VARIANTS[variant]
    saved = tiny_checkpoint(family, **config)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    decoder = load_decoder(StateDictCheckpoint(model.state_dict(), model.config.to_dict()), CPU, torch.float32)
    assert_equal_logits(decoder, saved, our_logits, their_logits)


@pytest.mark.parametrize("bad", [torch.ones(2, dtype=torch.int32), torch.ones(2, device="meta"), [1.0], None])
def test_a_state_dict_of_something_else_is_refused(bad: Any) -> None:
    with pytest.raises(RingkvError, match=r"x is .*: accepted is a dense tensor of floats"):
        StateDictCheckpoint({"x": bad}, {})


# VmHWM and not ru_maxrss: the latter begins with what the parent held when it forked.
PEAK = """
import sys, torch, gguf
from pathlib import Path
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.weights import load_decoder
import ringkv.models.checkpoints.gguf

def peak():
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

before = peak()
packed = len(sys.argv) > 2
decoder = load_decoder(open_checkpoint(sys.argv[1]), torch.device("cpu"), torch.float32, packed=packed)
assert decoder.embedding[-1].isfinite().all()
layer = sum(4 * x.numel() for name, x in decoder.destinations().items() if ".layers.0." in name)
print((peak() - before - packed * layer) / decoder.nbytes)
"""


def peak_of_a_load(model: str, cwd: Path, *packed: str) -> float:
    """Peak resident memory of a load above the imports, in sizes of the model; less a layer where it is packed."""
    command = [sys.executable, "-c", PEAK, model, *packed]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=120)
    return float(process.stdout)


def test_smollm2_loads_in_little_more_than_its_size(tmp_path: Path) -> None:
    assert 1.0 <= peak_of_a_load("smollm2", tmp_path) < 1.3


@pytest.mark.skipif(not can_pack(), reason="this processor has no packed product")
def test_smollm2_is_packed_as_it_is_read(tmp_path: Path) -> None:
    """``test_linear`` holds the size that this is measured in against the system's word."""
    assert 0.9 <= peak_of_a_load("smollm2", tmp_path, "packed") <= 1.15


def test_a_folder_loads_in_little_more_than_its_size(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 30_000, "hidden_size": 1024, "intermediate_size": 4096}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = Decoder(ModelConfig.from_hf(config), torch.device("meta"), torch.float32).destinations()
    save_file({name: torch.zeros(view.shape) for name, view in shapes.items()}, tmp_path / "model.safetensors")
    assert 1.0 <= peak_of_a_load(str(tmp_path), tmp_path) < 1.3


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("x")
    for model, why in [
        (str(tmp_path / "absent"), "does not exist"),
        (str(tmp_path / "absent.gguf"), "does not exist"),
        (str(tmp_path / "note.txt"), "is neither a folder nor a .gguf file"),
        ("not a/hub id", "does not exist"),
        ("", "does not exist"),
        ("x" * 5000, "cannot be opened"),
    ]:
        with pytest.raises(RingkvError, match=f"model = .*: {why}: "):
            open_checkpoint(model)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RingkvError, match=r"holds neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_a_revision_is_for_hub_ids(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RingkvError, match="revision = 'main': accepted is none"):
        open_checkpoint(tiny_checkpoint("llama"), revision="main")
