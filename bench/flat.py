"""Check that a long generation takes constant memory and constant time for each token.

    python bench/flat.py

A tiny random model generates 20,000 tokens, or 6,000 with ``--quick``; a tiny one is enough, since the text does not
matter. The bytes of the ring, the resident memory and the step time are measured. The script exits with 1 if memory
grows. A missed goal of time is only printed, because machines are noisy. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

import psutil
import torch

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps.measure.bench import Clock
from ringkv.bench.common import finish
from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rms_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=4096,
    tie_embeddings=False,
)


def main() -> int:
    """Measure and print; the exit code is 1 if memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    tokens = 6_000 if parser.parse_args().quick else 20_000
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Decoder(CONFIG, torch.device("cpu"), torch.float32)
    for view in model.destinations().values():
        torch.nn.init.normal_(view, std=0.3)
    ring = RingConfig(budget=256, window=64)
    process, resident, ring_bytes = psutil.Process(os.getpid()), [], set()
    clock = Clock(model.device)
    with Engine(model, ring=ring) as engine:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, on_repetition="ignore")
        for step, event in enumerate(engine.stream(list(range(40)), params)):
            done = event.completion
            clock.mark()
            if step % 100 == 99:
                resident.append(process.memory_info().rss)
                ring_bytes.add(engine.ring.nbytes)
    assert done is not None
    times = clock.between()
    early, late = statistics.median(times[1000:2000]), statistics.median(times[-1000:])
    growth = resident[-1] - resident[9]
    targets = {
        "ring_bytes_change": {"value": len(ring_bytes) - 1, "goal": 0, "met": len(ring_bytes) == 1},
        "resident_growth_mib": {"value": growth / 2**20, "goal": 2, "met": growth < 2 << 20},
        "late_over_early": {"value": late / early, "goal": 1.1, "met": late <= 1.1 * early},
    }
    print(f"{done.completion_tokens} tokens, {done.ring['evictions']} evictions, ring of {done.ring['bytes']} bytes")
    print(f"median ms a token: {early:.3f} (1,000-2,000), {late:.3f} (the last 1,000)")
    print(f"resident memory grew by {growth / 2**20:.2f} MiB after the first 1,000 tokens")
    figures = {"bench": "flat", "model": "random, 4 layers", "dtype": "float32", "tokens": tokens, "seed": 0}
    finish({**figures, "policy": done.ring["policy"], "targets": targets})
    return 0 if len(ring_bytes) == 1 and growth < 2 << 20 else 1


if __name__ == "__main__":
    sys.exit(main())
