"""Files of query statistics: written, read again, and refused where they are not what they should be."""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine.calibration import calibrate
from ringkv.engine.policies.statistics import load_statistics
from ringkv.models.config import RopeConfig
from tiny import tiny_config, tiny_decoder, tiny_weights

CONFIG = tiny_config("qwen3")
IDS = torch.randint(97, (200,), generator=torch.Generator().manual_seed(1)).tolist()
NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")
SHAPE = (3, 4, 8)


def make_engine(policy, config=CONFIG, weights=None, dtype=torch.float32):
    return Engine(
        tiny_decoder(config, tiny_weights(config, dtype) if weights is None else weights),
        ring=RingConfig(40, 8, policy, "all"),
    )


@pytest.fixture
def file(tmp_path):
    with make_engine("triattention").alone() as runner:
        (tmp_path / "own.safetensors").write_bytes(calibrate(runner, IDS))
    return tmp_path / "own.safetensors"


def unrotated_queries(config, ids):
    """What each layer's queries are where positions do not turn them: [L, Hq, n, D]."""
    decoder = tiny_decoder(config, tiny_weights(config, torch.float64))
    n, found = len(ids), []
    angles, still = decoder.angles(torch.arange(n)), decoder.angles(torch.zeros(n, dtype=torch.int64))

    def attention(layer, qkv):
        q, k, v = decoder.split(layer, qkv, angles[layer.index])
        found.append(decoder.split(layer, qkv, still[layer.index])[0].transpose(0, 1))
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    decoder.forward(torch.tensor(ids), attention)
    return torch.stack(found)


def test_the_means_are_those_of_the_queries_before_rope(file):
    """After the norm that Qwen3 has. Oracle: the same layers with angles of 0."""
    mean, modulus = load_statistics(str(file), CONFIG)
    queries = unrotated_queries(CONFIG, IDS)
    torch.testing.assert_close(mean, queries.mean(2).float(), rtol=1e-4, atol=1e-5)
    pairs = torch.complex(*queries.chunk(2, -1)).abs().mean(2)
    torch.testing.assert_close(modulus, pairs.float(), rtol=1e-4, atol=1e-5)


def test_a_request_scores_with_the_file_and_leaves_it_as_it_is(file):
    engine = make_engine(f"triattention:stats={file}")
    own = make_engine("triattention")
    params = SamplingParams(temperature=0, max_tokens=60, on_repetition="ignore")
    assert engine.generate(IDS[:50], params).ring["evictions"] > 5
    own.generate(IDS[:50], params)
    mean, modulus = load_statistics(str(file), CONFIG)
    assert torch.equal(engine.ring.state.lanes["q_mean"][:, 0], mean)
    assert torch.equal(engine.ring.state.lanes["q_modulus"][:, 0], modulus)
    assert not torch.equal(own.ring.state.lanes["q_mean"][:, 0], mean)


def test_another_model_is_refused(file):
    """One number of one weight differs, of a norm or of a product; see ``tests/models/test_digest.py``."""
    changed = tiny_weights(CONFIG, torch.float32)
    changed["model.layers.1.self_attn.o_proj.weight"][3, 5] *= 1.5
    with pytest.raises(
        RingkvError, match=r"^policy triattention: its statistics are of a model with digest \w{16}, and"
    ):
        make_engine(f"triattention:stats={file}", weights=changed)
    with pytest.raises(
        RingkvError, match=r"stats = '.*': q_mean_real is float32 \[3, 4, 8\]; accepted is float32 \[2, 4"
    ):
        make_engine(f"triattention:stats={file}", tiny_config("qwen3", layers=2))


def released(path, stats=None, **metadata):
    if stats is None:
        one = {name: torch.ones(SHAPE[2]) for name in NAMES}
        stats = {f"layer{layer:02d}_head{head:02d}": one for layer in range(3) for head in range(4)}
    torch.save({"metadata": {"rope_style": "half", "head_dim": 16, **metadata}, "stats": stats}, path)


def test_a_file_of_the_authors(tmp_path):
    released(tmp_path / "s.pt")
    mean, modulus = load_statistics(str(tmp_path / "s.pt"), CONFIG)
    assert torch.equal(mean, torch.ones(3, 4, 16))
    assert torch.equal(modulus, torch.ones(3, 4, 8))
    engine = make_engine(f"triattention:stats={tmp_path / 's.pt'}")
    params = SamplingParams(temperature=0, max_tokens=60, on_repetition="ignore")
    assert engine.generate(IDS[:50], params).ring["evictions"] > 5


class Unsafe:
    def __reduce__(self):
        return print, ("unpickled",)


def bad_files(file):
    """name -> (what makes it, what is said)."""
    tensors = load_file(file)
    nan = {**tensors, "q_abs_mean": torch.full(SHAPE, torch.nan)}
    about = {"format": "ringkv query statistics"}
    return {
        "missing": (lambda path: None, "No such file"),
        "text": (lambda path: path.write_text("hello"), "not what ringkv calibrate writes"),
        "format": (lambda path: save_file(tensors, path), "it has another format"),
        "old": (lambda path: save_file(tensors, path, {**about, "model": "0" * 16}), "did not tell a model from its"),
        "tensor": (lambda path: save_file({"q": torch.ones(3)}, path, about), "not what ringkv calibrate writes"),
        "nan": (
            lambda path: save_file(nan, path, about),
            "q_abs_mean is float32 [3, 4, 8]; accepted is float32 [3, 4, 8]",
        ),
        "half": (
            lambda path: save_file({name: x.half() for name, x in tensors.items()}, path, about),
            "q_mean_real is float16 [3, 4, 8]; accepted is float32",
        ),
        "large": (lambda path: path.write_bytes(bytes(2 << 20)), "2097152 bytes; accepted are at most 1124608"),
        "bomb": (bomb, "accepted are at most 1124608"),
        "style": (lambda path: released(path, rope_style="interleaved"), "rope_style is 'interleaved', not 'half'"),
        "heads": (lambda path: released(path, {"layer00_head00": {}}), "it has 1 heads, not 3 layers of 4"),
        "object": (lambda path: torch.save(Unsafe(), path), "not what ringkv calibrate writes"),
        "list": (lambda path: torch.save([1], path), "not what ringkv calibrate writes"),
    }


def bomb(path):
    """An archive of few bytes that unpacks to many."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(8 << 20))


def test_bad_files_are_refused_in_a_line(file, tmp_path, capsys):
    for name, (make, said) in bad_files(file).items():
        path = tmp_path / name
        make(path)
        with pytest.raises(RingkvError) as error:
            make_engine(f"triattention:stats={path}")
        message = str(error.value)
        assert message.startswith(f"policy triattention: stats = '{path}': "), name
        assert said in message, name
        assert "\n" not in message, name
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("policy", ["triattention", "expected-attention"])
def test_dynamic_rope_is_refused(policy):
    config = replace(CONFIG, rope=RopeConfig("dynamic", factor=2.0))
    message = f"policy {policy}: the RoPE of this model is 'dynamic'; accepted is any other kind"
    with pytest.raises(RingkvError, match="^" + re.escape(message) + "$"):
        make_engine(policy, config)
    make_engine("gkv", config)


@pytest.mark.parametrize("policy", ["triattention", "expected-attention"])
def test_layers_without_rope(policy):
    """Their frequencies are 0, and the means those of the queries as they are stored."""
    config = replace(tiny_config(), nope_layers=(1,))
    engine = make_engine(policy, config)
    assert [bool(row.any()) for row in engine.ring.inv_freq] == [True, False, True]
    params = SamplingParams(temperature=0, max_tokens=60, on_repetition="ignore")
    assert engine.generate(IDS[:50], params).ring["evictions"] > 5
    if policy == "triattention":
        with engine.alone() as runner:
            runner.ring.reset(0, seed=0)
            runner.prefill(0, IDS[:8])
            stored = engine.ring.queries[1, 0].mean(1)
        torch.testing.assert_close(engine.ring.state.lanes["q_mean"][1, 0], stored, rtol=1e-5, atol=1e-6)
