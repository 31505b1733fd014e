"""Completions from what the engine holds at the end of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringkv.engine.completion import Completion
from ringkv.engine.request import Generation
from ringkv.engine.spec import describe, fields_of
from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine.engine import Engine


def completion(engine: Engine, generation: Generation) -> Completion:
    """The completion of a request that has just ended, its lane's figures still in the ring."""
    request = generation.request
    ring = engine.ring
    lane = generation.lane
    report = _ring(engine) | {
        "seen": len(request.ids) + len(generation.tokens) - 1 if generation.tokens else len(request.ids),
        "kept": int(ring.counts[:, lane].max()),
        "evictions": int(ring.evicted[:, lane].max()),
        "retained": generation.retained,
        "evictions_per_layer": ring.evicted[:, lane].tolist(),
        "peak_slots": int(ring.spans[:, lane].max()),
        "seed": request.seed,
    }
    return Completion(
        text="".join(generation.pieces),
        thinking=None,
        token_ids=list(generation.tokens),
        **generation.counts(),
        finish_reason=generation.finish_reason or "error",
        stop_reason=generation.stop_reason,
        repetition=None,
        sampling=request.sampling.report(),
        logprobs=None,
        warnings=generation.warnings(),
        error=generation.error,
        timing=generation.timing(),
        sample=request.sample,
        **_engine(engine),
        ring=report,
    )


def failure(engine: Engine, error: RingkvError) -> Completion:
    """The completion of a request that was refused before it ran."""
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
        **_engine(engine),
        ring=_ring(engine) | nothing | {"seed": None},
    )


def _engine(engine: Engine) -> dict[str, Any]:
    dtype = str(engine.model.dtype).removeprefix("torch.")
    return {
        "model": engine.name,
        "dtype": {"weights": dtype, "compute": dtype, "ring": str(engine.ring.k.dtype).removeprefix("torch.")},
        "backend": "torch",
    }


def _ring(engine: Engine) -> dict[str, Any]:
    config = engine.ring.config
    return {
        "policy": engine.ring.policy.name,
        "params": fields_of(engine.ring.policy),
        "budget": config.budget,
        "window": config.window,
        "capacity": config.capacity,
        "bytes": engine.ring.nbytes,
        "retention": describe(engine.ring.retention),
    }
