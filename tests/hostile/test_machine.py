"""Sizes that the machine has not: refused before they are taken. Each runs in a process with limits."""

from __future__ import annotations

import resource
import subprocess
import sys

BEGIN = """
import resource, sys, time
import torch
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.models.config import ModelConfig
from ringkv.engine.memory import Planner
torch.set_num_threads(1)
SIZES = dict(model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2)
def engine(**changes):
    from ringkv.models.decoder import Decoder
    config = ModelConfig.from_hf(SIZES | {"max_position_embeddings": 1 << 30})
    decoder = Decoder(config, torch.device("cpu"), torch.float32)
    for view in decoder.destinations().values():
        view.normal_(std=0.05)
    return Engine(decoder, ring=RingConfig(48, 8), **changes)
"""


def child(code, *, seconds=100, memory=4 << 30):
    """What a process prints that may take no more than this."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_prompt_that_the_memory_cannot_read_is_refused_and_the_next_one_served():
    """Under a limit of the process; oracle: what is taken, and that a prompt of the length that is named is read."""
    out = child(
        """
with engine() as it:
    greedy = SamplingParams(temperature=0, max_tokens=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = it.generate([7] * 3_000_000, greedy)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert done.finish_reason == "error" and done.error["type"] == "MemoryError", done
    print(done.error["message"])
    assert taken < 700_000, taken  # KiB: the list of ids, and the torch that the count loads
    assert it.longest_prompt() < 3_000_000
    assert it.generate([7] * 3000, greedy).finish_reason == "length"
    assert it.score([3] * 9).shape == (8,)
"""
    )
    assert out.startswith("memory: to read a prompt of 3000000 tokens takes ")
    assert "accepted are up to " in out


def test_a_score_keeps_one_number_a_token():
    """The rows of 200,000 logits of 400 tokens are 320 MB."""
    child(
        """
SIZES["vocab_size"] = 200_000
with engine() as it:
    it.score([3] * 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scores = it.score(list(range(3, 403)))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert scores.shape == (399,) and taken < 100_000, taken
"""
    )


def test_a_plan_is_arithmetic():
    """Its time, of the processor, does not grow with what is planned; once warm, since torch loads libraries for it."""
    child(
        """
experts = {"model_type": "qwen3_moe", "num_experts": 128, "head_dim": 64, "moe_intermediate_size": 1 << 20}
wide = ModelConfig.from_hf(SIZES | experts | {"num_hidden_layers": 1024, "vocab_size": 1 << 24})
for config in (ModelConfig.from_hf(SIZES), wide):
    for ring in (RingConfig(512, 64), RingConfig(1 << 20, 64), RingConfig(512, 64, "h2o"), RingConfig(512, 64, "rkv")):
        Planner(config, torch.float32).prefill_bytes(ring, 100)
        began = time.process_time()
        planner = Planner(config, torch.float32)
        bytes = [planner.prefill_bytes(ring, n) for n in (4096, 1_000_000, 4_000_000)]
        assert bytes == sorted(bytes)
        planner.plan(ring, 4)
        taken = time.process_time() - began
        print(taken)
        assert taken < 4, taken  # four prompts
"""
    )
