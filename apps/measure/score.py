"""The answer to ``ringkv score``."""

from __future__ import annotations

import math
from typing import Any

from ringkv.engine import Engine, fixed_seeds


def score_text(engine: Engine, text: str, seed: int | None = None) -> dict[str, Any]:
    """The log-likelihood of a text under the ring of an engine, in nats, with what it was computed with.

    Args:
        seed: of policies that draw; None is the engine's.

    Raises:
        RingkvError: a text of fewer than two tokens, or one that policy full cannot hold.
    """
    ids = engine.encode(text)
    scores = engine.score(ids, None if seed is None else [seed]).flatten()
    total, ring = float(scores.double().sum()), engine.ring.config
    per_token = -total / len(scores)
    return {
        "tokens": len(ids),
        "log_likelihood": total,
        "nll_per_token": per_token,
        "perplexity": math.exp(min(700.0, per_token)),  # beyond that it is no float
        **engine.about(),
        "ring": {"budget": ring.budget, "window": ring.window},
        "policy": ring.policy.name,
        "warnings": fixed_seeds(seed),
    }
