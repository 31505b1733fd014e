"""Completions from what the engine holds at the end of a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ringkv.engine.completion import Completion
from ringkv.engine.record import Record
from ringkv.engine.request import Generation
from ringkv.engine.spec import describe, fields_of
from ringkv.engine.text.thoughts import ANSWER, THINKING
from ringkv.errors import RingkvError

if TYPE_CHECKING:
    from ringkv.engine.engine import Engine


def completion(engine: Engine, generation: Generation, trace: Record | None = None) -> Completion:
    """The completion of a request that has ended."""
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
        **describe_engine(engine),
        ring=_ring(engine) | generation.figures | report,
        trace=trace,
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
        **describe_engine(engine),
        ring=_ring(engine) | nothing | {"seed": None},
    )


def describe_engine(engine: Engine) -> dict[str, Any]:
    """What ran: model, types, backend, as results name them."""
    weights, compute, ring = (
        str(dtype).removeprefix("torch.")
        for dtype in (engine.model.weight_dtype, engine.model.dtype, engine.ring.k.dtype)
    )
    return {
        "model": engine.name,
        "dtype": {"weights": weights, "compute": compute, "ring": ring},
        "backend": engine.backend,
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
