"""Eviction policies: which tokens leave the ring when it is full.

A policy is a frozen dataclass of its hyperparameters with one method, ``priority``: a float32 number for every
candidate, of which the lowest leave. To add one, write the dataclass and register it; tests run over the whole table.
"""

from ringkv.engine.policies.base import (
    POLICIES,
    Policy,
    as_policy,
    gave_nan,
    policy_table,
    priorities,
    register_policy,
    shown,
)

# The table stands in the order of registration: simple ones first.
# isort: split
from ringkv.engine.policies.recency import Full, Random, Streaming

# isort: split
from ringkv.engine.policies.attention import GKV, H2O, RKV, SnapKV, Tova

# isort: split
from ringkv.engine.policies.vase import CurDKV, ValueRange, VaseAttnV, VaseDKV

# isort: split
from ringkv.engine.policies.future import ExpectedAttention, TriAttention

__all__ = [
    "GKV",
    "H2O",
    "POLICIES",
    "RKV",
    "CurDKV",
    "ExpectedAttention",
    "Full",
    "Policy",
    "Random",
    "SnapKV",
    "Streaming",
    "Tova",
    "TriAttention",
    "ValueRange",
    "VaseAttnV",
    "VaseDKV",
    "as_policy",
    "gave_nan",
    "policy_table",
    "priorities",
    "register_policy",
    "shown",
]
