"""What lanes are worth: the same prompts one after another and several at once, on SmolLM2, with evictions.

    python bench/lanes.py

Both engines share one decoder and run in turn, prompt for prompt the same; the last line is JSON. ``--quick`` is a
quarter of it.
"""

from __future__ import annotations

import argparse

from ringkv import Completion, Engine, RingConfig, SamplingParams
from ringkv.bench.common import finish, note
from ringkv.engine.measure import seconds

SUBJECTS = ("rain", "bread", "the moon", "rivers", "chess", "salt", "bees", "maps")
QUESTIONS = ("Explain in detail how {} came to matter to people.", "Write a short story about {}.")


def run(engine: Engine, prompts: list[str], params: SamplingParams) -> tuple[float, int, int]:
    """Tokens a second, tokens, evictions."""
    results: list[Completion] = []
    took = seconds(lambda: results.extend(engine.generate(prompts, params)))
    tokens = sum(done.completion_tokens for done in results)
    return tokens / took, tokens, sum(done.ring["evictions"] for done in results)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    prompts = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    new = 128
    if options.quick:
        prompts, new = prompts[::4], 96
    lanes = min(options.lanes, len(prompts))
    ring = RingConfig(budget=96, window=32)
    params = SamplingParams(max_tokens=new, ignore_eos=True, on_repetition="ignore", seed=0)
    with Engine.from_pretrained("smollm2", ring=ring, dtype=options.dtype) as alone:
        together = Engine(alone.model, alone.tokenizer, ring=ring, lanes=lanes)
        run(alone, prompts[:1], params.replace(max_tokens=8))
        run(together, prompts[:lanes], params.replace(max_tokens=8))
        speed_alone, tokens, evictions = run(alone, prompts, params)
        speed_together, *_ = run(together, prompts, params)
        dtype = str(alone.model.weight_dtype).removeprefix("torch.")
    ratio = speed_together / speed_alone
    note(f"{len(prompts)} prompts, {tokens} tokens, {evictions} evictions, {dtype}")
    note(f"one after another {speed_alone:.1f} tok/s, {lanes} lanes {speed_together:.1f} tok/s: {ratio:.2f} x")
    figures = {"bench": "lanes", "model": "smollm2", "dtype": dtype, "prompts": len(prompts), "new_tokens": new}
    figures |= {"budget": 96, "window": 32, "seed": 0, "evictions": evictions, "lanes": lanes}
    finish({**figures, "tok_s_alone": speed_alone, "tok_s_lanes": speed_together, "ratio": ratio})


if __name__ == "__main__":
    main()
