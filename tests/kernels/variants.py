"""Record, without a GPU, which variants of the kernels are launched after the warm-up of a captured step.

Runs on the meta device, where launches are recorded and nothing is computed. Prints one JSON line for each policy and
number of lanes: how many variants the warm-up has, and the names of those that come later. Must run in a process of its
own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ringkv.engine.config import RingConfig
from ringkv.engine.graph import GraphRunner
from ringkv.engine.policies import POLICIES
from ringkv.engine.ring.storage import Ring
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import use
from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder
from ringkv.tests.kernels.aot import specialise

META = torch.device("meta")
CONFIG = ModelConfig("qwen3", 97, 64, 96, 2, 4, 2, 16, 1e-6, RopeConfig(), 4096, tie_embeddings=False, qk_norm=True)
# Shorter than the ring of 58 slots, as long, longer; candidates in multiples of 16 and others. In turn they fill lanes.
PROMPTS = (1, 40, 20, 57, 58, 5000, 56, 512, 3)


def run(policy: str, lanes: int) -> dict[str, Any]:
    """The variants of a warm-up, then of prompts in every lane and of steps whose evictions come at different times."""
    launches: dict[str, str] = {}

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.setdefault(repr((self.fn.__name__, *specialise(self, args), options)), self.fn.__name__)

    JITFunction.run = record
    ring = Ring(CONFIG, RingConfig(50, 8, policy, "all"), lanes, META, torch.bfloat16)
    steering = Steering(lanes, (5, 6), META)
    model, sampler = Decoder(CONFIG, META, torch.bfloat16), Sampler(lanes, 97, META, static=True)
    runner = GraphRunner(model, ring, sampler, steering, captured=lambda step: (step(), step)[1])
    warm, evictions = dict(launches), 0
    for turn, n in enumerate(PROMPTS):
        if not ring.policy.evicts:
            n = n % 40 + 1
        lane = turn % lanes
        ring.reset(lane, seed=turn)
        logits = runner.prefill(lane, [1] * n)
        steering.apply(sampler.draw(logits, ring, [lane]), [lane])
        for _ in range(9):
            runner.device_step()
            runner.after_step()
        evictions += int(ring.evicted.sum())
    late = sorted(name for key, name in launches.items() if key not in warm)
    return {"policy": policy, "lanes": lanes, "warm": len(warm), "late": late, "evictions": evictions}


def main() -> None:
    with use("triton"), torch.inference_mode():
        for policy in POLICIES:
            for lanes in (1, 5):
                print(json.dumps(run(policy, lanes)), flush=True)


if __name__ == "__main__":
    main()
