"""Compile, without a GPU, every kernel that a step and an eviction launch; prints one JSON line a kernel and target.

A step and the evictions run on the meta device with the launchers' own constants; what they would launch is recorded
and compiled. Must run in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ringkv.engine.config import RingConfig
from ringkv.engine.ring.evict import evict_due
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import use
from ringkv.models.config import ModelConfig, RopeConfig
from ringkv.models.decoder import Decoder

LANES = (1, 4, 16)
META = torch.device("meta")
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}
POLICIES = ("vase-attnv", "vase-dkv", "rkv", "tova", "h2o", "gkv", "expected-attention", "triattention")
# What is hardest on registers: the largest over a head group's queries, their sum, and the default.
HARDEST = ("vase-attnv", "rkv", "h2o")

Launch = tuple[JITFunction, dict[str, str], dict[str, Any], dict[tuple[int], list[Any]], dict[str, int]]

# Global, since forked workers inherit what cannot be pickled.
JOBS: list[tuple[str, GPUTarget, torch.dtype, Launch]] = []


def shape(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, **flags: Any):
    """One layer of a model: all layers launch the same."""
    sizes = (vocabulary, hidden, intermediate, 1, heads, kv_heads, head_dim)
    return ModelConfig("qwen3", *sizes, 1e-6, RopeConfig(), 40960, tie_embeddings=False, **flags)


MODELS = {
    "Qwen3-8B": shape(4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "Qwen3-0.6B": shape(1024, 3072, 16, 8, 128, 151936, qk_norm=True),
    "Llama-3.1-8B": shape(4096, 14336, 32, 8, 128, 128256),
    "SmolLM2": shape(576, 1536, 9, 3, 64, 49152),
}
# Head groups of 1, 5, 7, 8 and 16 query heads, and the widest heads.
GROUPS = {
    "group 1": shape(4096, 12288, 32, 32, 128, 151936),
    "Qwen3-14B": shape(5120, 17408, 40, 8, 128, 151936, qk_norm=True),
    "Qwen2.5-7B": shape(3584, 18944, 28, 4, 128, 151936),
    "Qwen3-32B": shape(5120, 25600, 64, 8, 128, 151936, qk_norm=True),
    "group 16": shape(4096, 12288, 64, 4, 128, 151936, qk_norm=True),
    "wide heads": shape(2048, 8192, 8, 2, 256, 151936, qk_norm=True),
}
CUDA, HIP = "cuda", "hip"
HOPPER = GPUTarget(CUDA, 90, 32)
TARGETS = [
    *((name, HOPPER, torch.bfloat16) for name in MODELS | GROUPS),
    *(("Qwen3-8B", GPUTarget(CUDA, arch, 32), torch.bfloat16) for arch in (80, 89, 120)),
    ("Qwen3-8B", GPUTarget(HIP, "gfx942", 64), torch.bfloat16),
    ("Qwen3-8B", HOPPER, torch.float16),
    ("Qwen3-8B", HOPPER, torch.float32),
]


def record(
    config: ModelConfig, policies: Sequence[str], lane_counts: Sequence[int], hip: bool, dtype: torch.dtype
) -> list[Launch]:
    """What a sampled step over all lanes and an eviction under each policy would launch."""
    launches: dict[str, Launch] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = self, *specialise(self, args), options
        launches.setdefault(repr((self.fn.__name__, *launch[1:])), launch)

    JITFunction.run, torch.version.hip = run, "recording" if hip else None
    with use("triton"), torch.inference_mode():
        for policy, lanes in itertools.product(policies, lane_counts):
            ring = Ring(config, RingConfig(policy=policy), lanes, META, dtype)
            model = Decoder(config, META, dtype)
            sampler = Sampler(lanes, config.vocab_size, META, static=True)
            Runner(model, ring, sampler, Steering(lanes, (1, 2), META)).device_step()
            ring.running = list(range(lanes))
            ring.counts[:] = ring.config.capacity - 1
            ring.follow()
            evict_due(ring)
    return list(launches.values())


def specialise(
    function: JITFunction, args: tuple[Any, ...]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[Any]]]:
    """Signature, constants and attributes as triton's launcher derives them from arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for i, (parameter, value) in enumerate(zip(function.params, args, strict=True)):
        kind, aligned, special = "constexpr", False, not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and special):
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            kind = f"*{NAMES[value.dtype]}"
            aligned = value.storage_offset() * value.itemsize % 16 == 0
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind, aligned = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
        signature[parameter.name] = kind
        if aligned and special:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compiled(job: int) -> dict[str, Any]:
    """The figures of one kernel."""
    model, target, dtype, (function, signature, constants, attributes, options) = JOBS[job]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=target, options=options)
    name = function.fn.__module__.rpartition(".")[2].removesuffix("_triton") + function.fn.__name__
    row = {"kernel": name, "model": model, "target": str(target.arch), "dtype": NAMES[dtype]}
    row["shared"] = kernel.metadata.shared
    if target.backend == HIP:
        text = kernel.asm["amdgcn"]
        found = {key: re.search(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count")}
        registers, spills = (int(match[1]) for match in found.values() if match)
        return row | {"registers": registers, "spills": spills}
    usage = resources(kernel.asm["cubin"])
    row |= {"registers": usage["REG"], "spills": usage["STACK"]}
    if row["kernel"] in ("append_append", "attention_attend"):
        row["accesses"] = accesses(kernel.asm["ptx"])
    return row


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes (spills) of a kernel; LOCAL stays 0 even where registers spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        out = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", out)}


def accesses(ptx: str) -> dict[str, int]:
    """How often global memory is read and written, by the bytes of an access: {"load 16": 2, ...}."""
    found: dict[str, int] = {}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.[a-z_:0-9]+)*?(?:\.v(\d))?\.[bfsu](\d+)", ptx):
        name = f"{'load' if kind == 'ld' else 'store'} {int(vector or 1) * int(bits) // 8}"
        found[name] = found.get(name, 0) + 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*\], (0x[0-9a-f]+|\d+)", ptx):
        name = f"copy {int(size, 0)}"
        found[name] = found.get(name, 0) + 1
    return found


def main() -> None:
    known = set()
    for name, target, dtype in TARGETS:
        all_of_it = (name, target, dtype) == TARGETS[0]
        policies, lanes = (POLICIES, LANES) if all_of_it else (HARDEST, LANES[-1:])
        for launch in record((MODELS | GROUPS)[name], policies, lanes, target.backend == HIP, dtype):
            key = repr((target, launch[0].fn.__name__, *launch[1:]))
            if key not in known:
                known.add(key)
                JOBS.append((name, target, dtype, launch))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for row in pool.imap(compiled, range(len(JOBS)), chunksize=4):
            print(json.dumps(row), flush=True)
    print(f"triton {triton.__version__}, {len(JOBS)} kernels", file=sys.stderr)


if __name__ == "__main__":
    main()
