"""Requests, lanes, the ring, its policies, and the loop that steps them.

The names below are the front door: all that ``apps`` and the command line take from this floor and those under it, each
imported when it is first asked for. The engine's own modules import each other, and never from here.
"""
# ruff: noqa: F401 - the names that are imported are for type checkers

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.engine.calibration import calibrate
    from ringkv.engine.completion import UNFINISHED, Completion, StreamEvent
    from ringkv.engine.config import LANE_LIMIT, RingConfig, SamplingParams
    from ringkv.engine.cost import bytes_read
    from ringkv.engine.engine import Engine
    from ringkv.engine.host_memory import free_memory
    from ringkv.engine.idle import fixed_seeds
    from ringkv.engine.loading import resolve_runtime
    from ringkv.engine.memory import Planner, settle
    from ringkv.engine.policies import policy_table
    from ringkv.engine.prompts import Prompts
    from ringkv.engine.record import DROPPED, LIVE, PREFILL, Record
    from ringkv.engine.runner import Progress, Runner
    from ringkv.engine.sampling.values import Sampling
    from ringkv.engine.seeds import effective_seed
    from ringkv.engine.snapshot import Snapshot
    from ringkv.engine.spec import describe
    from ringkv.engine.text.thoughts import ANSWER, THINKING
    from ringkv.models.checkpoints.open import open_checkpoint, open_config, open_tokenizer
    from ringkv.models.config import ModelConfig

_NAMES = {
    "engine.calibration": "calibrate",
    "engine.completion": "UNFINISHED Completion StreamEvent",
    "engine.config": "LANE_LIMIT RingConfig SamplingParams",
    "engine.cost": "bytes_read",
    "engine.engine": "Engine",
    "engine.host_memory": "free_memory",
    "engine.idle": "fixed_seeds",
    "engine.loading": "resolve_runtime",
    "engine.memory": "Planner settle",
    "engine.policies": "policy_table",
    "engine.prompts": "Prompts",
    "engine.record": "DROPPED LIVE PREFILL Record",
    "engine.runner": "Progress Runner",
    "engine.sampling.values": "Sampling",
    "engine.seeds": "effective_seed",
    "engine.snapshot": "Snapshot",
    "engine.spec": "describe",
    "engine.text.thoughts": "ANSWER THINKING",
    "models.checkpoints.open": "open_checkpoint open_config open_tokenizer",
    "models.config": "ModelConfig",
}
_HOME = {name: f"ringkv.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringkv.engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
