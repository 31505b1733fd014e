"""A script: runs a file of prompts on a real engine, in children that kill themselves with SIGKILL at set moments.

Each run is a fork of this process that loads the engine, since an engine is not used across a fork. A moment is
{"line": k, "keep": n}: of the k-th line that the run writes, from 0, only n bytes reach the file (negative: all but so
many); or {"bytes": n}: of all that it writes only n bytes do; or {"all": n}: the same of all files together, those of
snapshots among them, of which one is written every ``EVERY`` tokens if that is not 0.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps.jobs.checkpoints import Checkpoints
from ringkv.apps.jobs.job import Job

SETTINGS = {"model": "tiny", "budget": 24, "lanes": 4}


def run(model: str, source: Path, output: Path, moment: dict[str, int] | None, every: int = 0) -> None:
    """One run in this process; returns only if it was not killed."""
    engine = Engine.from_pretrained(model, ring=RingConfig(budget=24, window=8), lanes=4, device="cpu")
    if moment is not None:
        die_at(moment, output)
    with Job(source, output, SamplingParams(n=2, seed=7, temperature=1.0, ignore_eos=True), SETTINGS) as job:
        job.run(functools.partial(engine.iterate, raw=True), checkpoints=Checkpoints(output, every, engine.load))


def die_at(moment: dict[str, int], output: Path) -> None:
    """From now on, writing to the output kills this process at the given moment."""
    write: Callable[[int, memoryview], int] = os.write
    lines = written = 0

    def dying(fd: int, data: memoryview) -> int:
        nonlocal lines, written
        if "all" in moment:
            last = moment["all"] - written
            if last > len(data):
                written += len(data)
                return write(fd, data)
            write(fd, data[:last])
            os.kill(os.getpid(), signal.SIGKILL)
        if not output.exists() or not os.path.samestat(os.fstat(fd), output.stat()):
            return write(fd, data)
        last = len(data) + 1
        if "bytes" in moment:
            last = moment["bytes"] - written
        elif lines == moment["line"]:
            last = min(moment["keep"], len(data)) if moment["keep"] >= 0 else len(data) + moment["keep"]
        if last > len(data):
            lines, written = lines + 1, written + len(data)
            return write(fd, data)
        write(fd, data[:last])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    os.write = dying  # type: ignore[assignment]


def main(model: str, source: str, output: str, unbroken: str, moments: str, every: str = "0") -> None:
    """Prints, for each moment, the exit status of its run and the size that the file then had."""
    torch.set_num_threads(1)
    ends = []
    for path, moment in [(unbroken, None), *((output, moment) for moment in json.loads(moments)), (output, None)]:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                run(model, Path(source), Path(path), moment, int(every))
                status = 0
            finally:
                os._exit(status)
        ends.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), Path(path).stat().st_size))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
