"""Measure what lanes gain: the same prompts one after another and several at once, with evictions.

    python bench/lanes.py

Two engines share one SmolLM2 decoder and take the same prompts, one engine after the other. ``--quick`` generates
half as many tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from ringkv import Completion, Engine, RingConfig, SamplingParams
from ringkv.apps.measure.bench import seconds
from ringkv.bench.common import finish, note

SUBJECTS = ("rain", "bread", "the moon", "rivers", "chess", "salt", "bees", "maps")
QUESTION = "Explain in detail how {} came to matter to people."


def run(engine: Engine, prompts: list[str], params: SamplingParams) -> tuple[float, int, int]:
    """Generate from all prompts: tokens a second, tokens, evictions."""
    results: list[Completion] = []
    took = seconds(lambda: results.extend(engine.generate(prompts, params)))
    tokens = sum(done.completion_tokens for done in results)
    return tokens / took, tokens, sum(done.ring["evictions"] for done in results)


def measure(lanes: int, dtype: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Measure both engines on one decoder and return the figures."""
    prompts, new = [QUESTION.format(subject) for subject in SUBJECTS], 128 if quick else 256
    ring = RingConfig(budget=96, window=32)
    params = SamplingParams(max_tokens=new, ignore_eos=True, on_repetition="ignore", seed=0)
    with Engine.from_pretrained("smollm2", ring=ring, dtype=dtype) as alone:
        together = Engine(alone.model, alone.tokenizer, ring=ring, lanes=lanes)
        run(alone, prompts[:1], params.replace(max_tokens=8))
        run(together, prompts[:lanes], params.replace(max_tokens=8))
        speed_alone, tokens, evictions = run(alone, prompts, params)
        speed_together, *_ = run(together, prompts, params)
        dtype = str(alone.model.weight_dtype).removeprefix("torch.")
    figures = {"model": "smollm2", "dtype": dtype, "prompts": len(prompts), "new_tokens": new, "tokens": tokens}
    figures |= {"budget": 96, "window": 32, "seed": 0, "evictions": evictions, "lanes": lanes}
    speeds = {"tok_s_alone": speed_alone, "tok_s_lanes": speed_together, "ratio": speed_together / speed_alone}
    return figures | speeds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    found = measure(options.lanes, options.dtype, options.quick)
    note("{prompts} prompts, {tokens} tokens, {evictions} evictions, {dtype}".format(**found))
    note(
        "one after another {tok_s_alone:.1f} tok/s, {lanes} lanes {tok_s_lanes:.1f} tok/s: {ratio:.2f} x".format(
            **found
        )
    )
    finish({"bench": "lanes", **found})


if __name__ == "__main__":
    main()
