"""bench/cpu.py: what its figures are made of. CI runs the script itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringkv import Engine, RingConfig
from ringkv.bench.cpu import AROUND, PROMPT, Long, generate, prefill
from ringkv.bench.llama import KINDS, convert
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.weights import load_decoder
from tiny import tiny_config, tiny_decoder, tiny_weights


def test_medians_are_of_the_steps_around_a_length():
    run = Long([], [float(i) for i in range(1000)], [False] * 1000, {})
    first = (AROUND - 1) / 2  # the median of 0 .. AROUND - 1
    assert run.around(PROMPT) == first
    assert run.around(PROMPT + 300) == 300 + first
    assert run.around(10**6) == 1000 - AROUND + first


def test_share_of_evictions():
    """10 ms a step, and 64 ms more in every 64th: a tenth."""
    evicted = [step % 64 == 63 for step in range(640)]
    run = Long([], [74.0 if each else 10.0 for each in evicted], evicted, {})
    assert run.eviction_share() == pytest.approx(0.1)


def test_a_run_marks_the_steps_that_evict_and_counts_its_tokens():
    config = tiny_config(vocab_size=97, layers=2)
    engine = Engine(
        tiny_decoder(config, tiny_weights(config, torch.float32)), ring=RingConfig(80, 16, "streaming", "all")
    )
    run = generate(engine, 160, [70, 130])
    assert len(run.ids) == 161
    assert len(run.step_ms) == len(run.evicted) == 160 - PROMPT
    # A token is counted once it is written: 96 fill the ring after 32 steps, and then 16 leave every 16 steps.
    assert [step for step, evicted in enumerate(run.evicted, 1) if evicted] == [32, 48, 64, 80, 96]
    assert set(run.products_ms) == {70, 130}
    ms, taken, _ = prefill(engine, run.ids[:100])
    assert ms > 0
    assert taken >= 100 * config.hidden_size * 4


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_is_given_the_same_weights(kind, tmp_path):
    path = tmp_path / "model.gguf"
    convert(kind, path)
    ours: Any = load_decoder(open_checkpoint("smollm2"), torch.device("cpu"), torch.float32).destinations()
    theirs = load_decoder(open_checkpoint(str(path)), torch.device("cpu"), torch.float32).destinations()
    # f16 keeps 11 bits; q8_0 rounds to a 127th of the largest of a block of 32 numbers, in steps of half precision.
    for name, weight in ours.items():
        if weight.dim() == 1:
            assert torch.equal(theirs[name], weight), name
        elif kind == "f16":
            assert ((theirs[name] - weight).abs() <= 2.0**-11 * weight.abs() + 2.0**-25).all(), name
        else:
            blocks = weight.view(-1, 32)
            step = blocks.abs().amax(-1, keepdim=True) / 127
            assert ((theirs[name].view(-1, 32) - blocks).abs() <= step * (0.5 + 127 * 2.0**-11) + 2.0**-25).all(), name
