"""ringkv: long chain-of-thought generation on a KV ring of fixed size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Completion": "ringkv.engine.completion",
    "Engine": "ringkv.engine.engine",
    "Policy": "ringkv.engine.policies",
    "ReFreeKV": "ringkv.engine.retention",
    "RingConfig": "ringkv.engine.config",
    "RingkvError": "ringkv.errors",
    "SamplingParams": "ringkv.engine.config",
    "Snapshot": "ringkv.engine.snapshot",
    "StreamEvent": "ringkv.engine.completion",
    "register_policy": "ringkv.engine.policies",
}

__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from ringkv.engine.completion import Completion as Completion
    from ringkv.engine.completion import StreamEvent as StreamEvent
    from ringkv.engine.config import RingConfig as RingConfig
    from ringkv.engine.config import SamplingParams as SamplingParams
    from ringkv.engine.engine import Engine as Engine
    from ringkv.engine.policies import Policy as Policy
    from ringkv.engine.policies import register_policy as register_policy
    from ringkv.engine.retention import ReFreeKV as ReFreeKV
    from ringkv.engine.snapshot import Snapshot as Snapshot
    from ringkv.errors import RingkvError as RingkvError


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
