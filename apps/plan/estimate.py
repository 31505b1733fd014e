"""``ringkv plan``: what fits with a checkpoint's configuration, as figures and as a table."""

from __future__ import annotations

import os
import re
from typing import Any

from rich.table import Table

from ringkv.apps.console import listed_endings, show
from ringkv.engine import (
    LANE_LIMIT,
    ModelConfig,
    Planner,
    Prompts,
    RingConfig,
    free_memory,
    open_config,
    open_tokenizer,
    resolve_runtime,
    settle,
)
from ringkv.errors import RingkvError, check_count, check_int, size

FULL_CACHES = (4096, 32768, 131072)  # tokens
_MOST = 1 << 24  # the budget that is looked for
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def estimate(
    model: str | os.PathLike[str],
    ring: RingConfig,
    lanes: int | str = 1,
    *,
    prompt: int,
    memory: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
) -> dict[str, Any]:
    """Bytes of an engine, how many lanes and what budget fit, full caches beside it, and what ends a text; no weight is
    opened.

    Args:
        model: as ``open_checkpoint`` takes it; of a folder or hub id config.json is enough.
        prompt: tokens of the prompt whose prefill must fit.
        memory: a size such as "24GiB"; None is what is free on the device.

    Raises:
        RingkvError: what is not found or not accepted, by name.
    """
    check_count("lanes", lanes, LANE_LIMIT)
    check_int("prompt", prompt, 1)
    name, keys = open_config(model, revision=revision)
    config = ModelConfig.from_hf(keys)
    # No backend changes a byte, and this one needs no compiler.
    runtime = resolve_runtime(config, device=device, dtype=dtype, backend="torch")
    on_gpu = runtime.device.type == "cuda"
    if dtype == "auto" and on_gpu and not (keys.get("dtype") or keys.get("torch_dtype")):
        raise RingkvError("dtype = 'auto': config.json names none, and no weight is looked at: accepted is a type here")
    room = free_memory(runtime.device) if memory is None else parse_size(memory)
    if "auto" in (ring.budget, lanes):
        ring, lanes = settle(config, ring, lanes, runtime.dtype, runtime.device, packed=runtime.packed, free=room)
    assert isinstance(lanes, int)
    planner = Planner(config, runtime.dtype, prompt, runtime.packed, captured=on_gpu)
    try:
        plan = planner.plan(ring, lanes)
    except MemoryError as error:  # of the ring's working memory, whose size is fixed
        raise RingkvError(f"prompt = {prompt}: {error}") from None
    figures = {
        "model": name,
        "device": str(runtime.device),
        "policy": ring.policy.name,
        "weights": "float16, products packed" if runtime.packed else plan.dtype,
        **plan.to_dict(),
        "full_cache_bytes": {str(tokens): plan.full_cache_bytes(tokens) for tokens in FULL_CACHES},
        **_endings(model, config, ring, revision),
        "memory_bytes": room,
        "memory_source": "given" if memory is not None else f"free on {runtime.device}",
    }
    if room is not None:
        figures |= {
            "fits": plan.total_bytes <= room,
            "most_lanes": planner.most_lanes(ring, room, LANE_LIMIT),
            "longest_prompt": planner.longest_prompt(ring, room - (plan.total_bytes - plan.prefill_bytes)),
            "most_budget": planner.most_budget(ring, lanes, room, _MOST),
        }
    return figures


def parse_size(text: str) -> int:
    """Bytes of "24GiB", "500 MB", "1.5G" (decimal without the i) or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    number, unit, binary = found.groups(default="") if found is not None else ("inf", "", "")
    count = float(number) * (1024 if binary else 1000) ** _UNITS[unit.upper()]
    if count >= 2**63:
        raise RingkvError.bad("memory", text, "a size such as 24GiB, 500MB or 1.5G")
    return int(count)


def _endings(
    model: str | os.PathLike[str], config: ModelConfig, ring: RingConfig, revision: str | None
) -> dict[str, Any]:
    """The ids that end a text, with their tokens' texts; without a tokenizer, those that the configuration names."""
    endings, problem = dict.fromkeys(config.eos_ids, ""), None
    try:
        generation_config, tokenizer = open_tokenizer(model, revision=revision)
        endings = Prompts(config, tokenizer, generation_config, ring, None).endings
        if tokenizer is None:
            problem = "there is no tokenizer, which may know more"
    except RingkvError as error:
        problem = str(error)
    return {"endings": {str(id): text for id, text in endings.items()}, "endings_problem": problem}


def print_plan(figures: dict[str, Any]) -> None:
    """The arithmetic of an engine's memory on stdout."""
    table = Table("what", "shape", "type", "bytes", "", box=None, pad_edge=False)
    table.add_row("weights", figures["weights"], "", str(figures["weights_bytes"]), size(figures["weights_bytes"]))
    if figures["load_bytes"] > figures["weights_bytes"]:
        table.add_row("  loading", "while they are packed", "", str(figures["load_bytes"]), size(figures["load_bytes"]))
    for name, part in figures["tables"].items():
        table.add_row(f"  {name}", str(list(part["shape"])), part["dtype"], str(part["bytes"]), size(part["bytes"]))
    for name, what in (
        ("ring", "the sum of these"),
        ("scratch", "of evictions"),
        *[("step", "captured, at most")] * (figures["step_bytes"] > 0),
        ("prefill", f"at most, {figures['prompt_tokens']} tokens"),
        ("total", "at the worst moment"),
    ):
        table.add_row(name, what, "", str(figures[f"{name}_bytes"]), size(figures[f"{name}_bytes"]))
    for tokens, count in figures["full_cache_bytes"].items():
        table.add_row("full cache", f"{tokens} tokens", "", str(count), size(count))
    unknown = f" (of the configuration alone: {figures['endings_problem']})" if figures["endings_problem"] else ""
    show(
        f"{figures['model']}: budget {figures['budget']} + window {figures['window']} slots a KV head, policy "
        f"{figures['policy']}, lanes {figures['lanes']}, {figures['device']}",
        table,
        f"a text ends at: {listed_endings(figures['endings'])}{unknown}",
    )
    if figures["memory_bytes"] is not None:
        show(
            f"{size(figures['memory_bytes'])} {figures['memory_source']}: "
            f"this {'fits' if figures['fits'] else 'does not fit'}; "
            f"lanes that fit: {figures['most_lanes']}; longest prompt: {figures['longest_prompt']} tokens; "
            f"largest budget for {figures['lanes']} "
            f"lane{'s' * (figures['lanes'] > 1)}: {figures['most_budget']}"
        )
