"""Statistics of a model's queries, for ``triattention``; and which model a file of them was made for."""

from __future__ import annotations

from collections.abc import Sequence

from ringkv.engine.policies import Policy
from ringkv.engine.policies.statistics import save_statistics
from ringkv.engine.runner import Runner
from ringkv.errors import RingkvError
from ringkv.models.decoder import Decoder


def calibrate(runner: Runner, ids: Sequence[int]) -> bytes:
    """A file of query statistics from a text that is read as one prompt.

    The queries are those that RoPE turns, so after the norm that Qwen3 has. The authors' scripts/calibrate.py leaves
    out that norm, and rounds to bfloat16; for models without the norm it computes the same.

    Args:
        runner: of an engine whose policy is ``triattention`` without a file.
        ids: the text.
    """
    ring = runner.ring
    ring.reset(0, seed=0)
    runner.prefill(0, ids)
    mean, modulus = (ring.state.lanes[name][:, 0] for name in ("q_mean", "q_modulus"))
    return save_statistics(mean, modulus, runner.model.digest, len(ids))


def check_calibration(policy: Policy, model: Decoder) -> None:
    """Refuse a policy that is made for other weights.

    Raises:
        RingkvError: with both digests.
    """
    wanted = policy.calibrated_for
    if wanted is not None and wanted != model.digest:
        raise RingkvError(
            f"policy {policy.name}: its statistics are of a model with digest {wanted}, and this one has "
            f"{model.digest}; run ringkv calibrate for it"
        )
