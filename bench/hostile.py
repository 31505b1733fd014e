"""Leave an engine alone with bad luck, for longer than the tests do: interrupts, callers that leave, and odd rings.

    python bench/hostile.py --rounds 200

The model is tiny and random. A round of `interrupts` raises an exception at a line of ringkv that is drawn, in the
middle of a request; the next request must give the tokens that it gives alone. A round of `callers` starts 12 requests
from threads and asyncio tasks at once, of which some are cancelled or closed; the others must give the tokens that they
give alone, and the ring must be whole. A round of `rings` draws sizes and a policy, and checks every invariant of the
ring after each of 120 steps. The last line is JSON: how many were tried, and how many survived.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.bench.common import finish, note
from ringkv.bench.gpu_parts import TINY, build
from ringkv.engine.policies import POLICIES
from ringkv.engine.ring.integrity import check_integrity

ROOT = str(Path(__file__).parents[1])
CONFIG = next(iter(TINY.values()))
EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]


class Struck(BaseException):
    """What a signal handler might raise."""


def engine_of(draw: random.Random, lanes: int) -> Engine:
    window = draw.randint(1, 6)
    ring = RingConfig(draw.randint(window + 3, 40), window, draw.choice(EVICTING), sinks=draw.randint(0, 2))
    torch.manual_seed(0)
    return Engine(build(CONFIG, torch.device("cpu"), torch.float32), ring=ring, lanes=lanes)


def request(draw: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = [draw.randrange(CONFIG.vocab_size) for _ in range(draw.randint(1, 60))]
    return prompt, SamplingParams(seed=draw.getrandbits(32), max_tokens=draw.randint(1, 60), on_repetition="ignore")


def interrupted(engine: Engine, prompt: list[int], params: SamplingParams, after: int) -> int:
    """Run a request whose line number ``after`` raises; returns how many lines ran."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        lines += event == "line"
        if lines == after and event == "line":
            raise Struck
        return trace

    sys.settrace(trace)
    try:
        with suppress(Struck):
            engine.generate(prompt, params)
    finally:
        sys.settrace(None)
    return lines


def round_of_interrupts(draw: random.Random) -> bool:
    engine, (prompt, params) = engine_of(draw, draw.randint(1, 3)), request(draw)
    (wanted,) = engine.generate([prompt], params)
    interrupted(engine, prompt, params, draw.randint(1, interrupted(engine, prompt, params, -1)))
    (done,) = engine.generate([prompt], params)
    return done.token_ids == wanted.token_ids and done.ring == wanted.ring


def round_of_callers(draw: random.Random) -> bool:
    engine = engine_of(draw, draw.randint(1, 4))
    asked = [request(draw) for _ in range(12)]
    wanted = [engine.generate([prompt], params)[0].token_ids for prompt, params in asked]
    leaves = [draw.choice([1000, 1000, draw.randint(1, 20)]) for _ in asked]  # after how many tokens
    found: dict[int, list[int]] = {}

    def in_a_thread(i: int) -> None:
        tokens: list[int] = []
        for event in engine.stream(*asked[i]):
            tokens += event.token_ids
            if len(tokens) >= leaves[i]:
                return
        found[i] = tokens

    async def in_a_task(i: int) -> None:
        tokens: list[int] = []
        async for event in engine.astream(*asked[i]):
            tokens += event.token_ids
            if len(tokens) >= leaves[i]:
                raise asyncio.CancelledError
        found[i] = tokens

    async def tasks() -> None:
        await asyncio.gather(*(in_a_task(i) for i in range(0, 12, 2)), return_exceptions=True)

    threads = [threading.Thread(target=in_a_thread, args=(i,)) for i in range(1, 12, 2)]
    threads.append(threading.Thread(target=lambda: asyncio.run(tasks())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    with engine.alone():
        check_integrity(engine.ring)
    stayed = [i for i in range(12) if leaves[i] == 1000]
    return all(found.get(i) == wanted[i] for i in stayed) and not any(thread.is_alive() for thread in threads)


def round_of_rings(draw: random.Random) -> bool:
    engine = engine_of(draw, draw.randint(1, 4))
    with engine.alone() as runner:
        for lane in range(engine.lanes):
            engine.ring.reset(lane, lane)
            prompt = request(draw)[0]
            runner.first(lane, runner.prefill(lane, prompt))
        for _ in range(120):
            runner.step()
            check_integrity(engine.ring)
    return True


KINDS = {"interrupts": round_of_interrupts, "callers": round_of_callers, "rings": round_of_rings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to repeat one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"bench": "hostile", "model": "tiny, random", "dtype": "float32"}
    for kind, one in KINDS.items():
        survived = 0
        for number in range(options.first, options.first + options.rounds):
            try:
                good, why = one(random.Random(number)), "other tokens"
            except Exception as error:  # whatever it is, it is what this looks for
                good, why = False, f"{type(error).__name__}: {error}"
            survived += good
            if not good:
                note(f"{kind}, round {number}: {why}")
        note(f"{kind}: {survived} of {options.rounds} survived")
        result[kind] = {"tried": options.rounds, "survived": survived}
    finish(result)


if __name__ == "__main__":
    main()
