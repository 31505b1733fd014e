"""Measure files of prompts at size, with an engine that answers at once: what remains is reading, checking and writing.

    python bench/rows.py --rows 10000 100000
    python bench/rows.py --beside /path/to/another/ringkv

For each number of rows (10,000, 100,000 and 1,000,000 unless given) three processes run one after another: until the
first result, on until half of the rows are done, and resumed until the next result. Seconds are of processor time,
without the imports. The results are not synced to the disk. Peaks are resident memory, in MiB, above what the imports
took. ``--beside`` measures the package in another folder of the name ringkv too, such as a checkout of an earlier
commit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable
from os import _exit
from pathlib import Path
from typing import Any

import psutil

from ringkv import Completion, SamplingParams
from ringkv.apps.jobs.job import Job
from ringkv.bench.common import finish, note, table

PACKAGE = Path(__file__).parents[1]
ANSWER = "An answer of about as many letters as a short one has. " * 4
UPTO = ("first", "half", "resume")


def at_once(prompts: Iterable[Any], params: Iterable[SamplingParams]) -> Generator[tuple[int, Completion], None, None]:
    """An engine that answers at once."""
    fields: dict[str, Any] = dict.fromkeys(("thinking", "stop_reason", "repetition", "logprobs", "error"))
    fields |= {"prompt_tokens": 40, "completion_tokens": 50, "thinking_tokens": 0, "answer_tokens": 50, "sample": 0}
    fields |= {"model": "none", "dtype": {}, "backend": "none", "ring": {}, "sampling": {}, "timing": {}}
    fields |= {"text": ANSWER, "token_ids": list(range(50)), "finish_reason": "stop", "warnings": []}
    for index, _ in enumerate(zip(prompts, params, strict=True)):
        yield index, Completion(**fields)


def child(source: str, output: str, upto: int) -> None:
    """Run until so many results are there, and print the figures; the process then ends as if it were killed."""
    os.fsync = lambda fd: None
    held, begun = psutil.Process().memory_info().rss, time.process_time()

    def on_result(status: Any) -> None:
        if status.done >= upto:
            took = time.process_time() - begun
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held
            print(json.dumps({"s": took, "mib": peak / 2**20}), flush=True)
            _exit(0)

    with Job(source, output, SamplingParams(seed=0, max_tokens=50), {"lanes": 1}) as job:
        job.run(at_once, on_result)


def measure(package: Path, source: Path, rows: int) -> dict[str, float]:
    """The figures of a package for a file."""
    found: dict[str, float] = {}
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for phase, upto in zip(UPTO, (1, rows // 2, rows // 2 + 1), strict=True):
            command = [sys.executable, __file__, "--child", str(source), f"{folder}/out", str(upto)]
            done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment, cwd=folder)
            found |= {f"{phase}_{name}": value for name, value in json.loads(done.stdout).items()}
    return found


def write(source: Path, rows: int) -> None:
    """A file of so many rows."""
    with source.open("w") as file:
        for at in range(rows):
            question = f"Question {at}: " + "what would you say of this, in two sentences or three? " * 4
            row = {"id": f"q{at}", "messages": [{"role": "user", "content": question}], "params": {"top_p": 0.9}}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, output, upto = options.child
        child(source, output, int(upto))
        return
    packages = {"this": PACKAGE} | ({"beside": options.beside.resolve()} if options.beside else {})
    lines, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        for rows in options.rows:
            write(source, rows)
            for name, package in packages.items():
                found = measure(package, source, rows)
                figures.append({"package": name, "rows": rows, **found})
                note(f"{name}, {rows:,} rows: {found}")
                lines.append(
                    [name, f"{rows:,}", *(f"{found[f'{phase}_{kind}']:.2f}" for kind in ("s", "mib") for phase in UPTO)]
                )
    note(table(["package", "rows", *(f"{phase}, {kind}" for kind in ("s", "MiB") for phase in UPTO)], lines))
    finish({"bench": "rows", "figures": figures})


if __name__ == "__main__":
    main()
