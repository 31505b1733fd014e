"""Completions from what the engine holds at the end of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ringkv.engine.completion import Completion
from ringkv.engine.record import Record
from ringkv.engine.request import Generation
from ringkv.engine.ring.storage import Ring
from ringkv.engine.snapshot import Snapshot
from ringkv.engine.spec import describe, fields_of
from ringkv.engine.text.thoughts import ANSWER, THINKING


def completion(
    about: Mapping[str, Any],
    ring: Mapping[str, Any],
    generation: Generation,
    trace: Record | None = None,
    snapshot: Snapshot | None = None,
) -> Completion:
    """The completion of a request that has ended.

    Args:
        about: what ran, as ``Engine.about`` says it.
        ring: where it ran, see ``about_ring``.
    """
    request = generation.request
    thinking_tokens, answer_tokens = generation.counts()
    report = {
        "seen": generation.seen,
        "retained": generation.retained,
        "seed": request.seed,
    }
    return Completion(
        text=generation.texts[ANSWER],
        thinking=generation.texts[THINKING] if request.tags is not None else None,
        token_ids=list(generation.tokens),
        prompt_tokens=len(request.ids),
        completion_tokens=len(generation.tokens),
        thinking_tokens=thinking_tokens,
        answer_tokens=answer_tokens,
        finish_reason=generation.finish_reason or "error",
        stop_reason=generation.stop_reason,
        repetition=None if generation.repetition is None else dataclasses.asdict(generation.repetition),
        sampling=request.sampling.report(),
        logprobs=generation.logprobs if request.sampling.values["logprobs"] is not None else None,
        warnings=generation.warnings(),
        error=generation.error,
        timing=generation.timing(),
        sample=request.sample,
        **about,
        ring={**ring} | generation.figures | report,
        trace=trace,
        snapshot=snapshot,
    )


def failure(about: Mapping[str, Any], ring: Mapping[str, Any], error: Exception) -> Completion:
    """The completion of a request that was refused before it ran; see ``completion``."""
    nothing = {"seen": 0, "kept": 0, "evictions": 0, "retained": [], "evictions_per_layer": [], "peak_slots": 0}
    return Completion(
        text="",
        thinking=None,
        token_ids=[],
        prompt_tokens=0,
        completion_tokens=0,
        thinking_tokens=0,
        answer_tokens=0,
        finish_reason="error",
        stop_reason=None,
        repetition=None,
        sampling={},
        logprobs=None,
        warnings=[],
        error={"type": type(error).__name__, "message": str(error)},
        timing={"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0, "tokens_per_s": 0.0},
        sample=0,
        **about,
        ring={**ring} | nothing | {"seed": None},
    )


def about_ring(ring: Ring) -> dict[str, Any]:
    """What every result says of the ring."""
    config = ring.config
    return {
        "policy": ring.policy.name,
        "params": fields_of(ring.policy),
        "budget": config.budget,
        "window": config.window,
        "capacity": config.capacity,
        "bytes": ring.nbytes,
        "retention": describe(ring.retention),
    }
