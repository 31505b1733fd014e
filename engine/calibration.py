"""Statistics of a model's queries, for ``triattention``; and which model a file of them was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

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
    return save_statistics(mean, modulus, digest(runner.model), len(ids))


def check_calibration(policy: Policy, model: Decoder) -> None:
    """Refuse a policy that is made for other weights.

    Raises:
        RingkvError: with both digests.
    """
    wanted = policy.calibrated_for
    if wanted is not None and wanted != digest(model):
        raise RingkvError(
            f"policy {policy.name}: its statistics are of a model with digest {wanted}, and this one has "
            f"{digest(model)}; run ringkv calibrate for it"
        )


def digest(model: Decoder) -> str:
    """16 hex digits that tell a model from others, by its sizes and the weights of its norms.

    Norms are small and stay as they are where a model is quantised, and are compared as bfloat16, in which most were
    trained. A fine-tune that leaves them alone has the digest of its base.
    """
    c = model.config
    norms = [model.norm]
    for layer in model.layers:
        norms += [layer.input_norm, layer.mlp_norm, *(layer.qk_norms or ())]
    weights = torch.cat([norm.to(torch.bfloat16).flatten() for norm in norms]).view(torch.int16).cpu()
    sizes = f"{c.layers},{c.heads},{c.kv_heads},{c.head_dim},{c.hidden_size},{c.intermediate_size},{c.rope}"
    return hashlib.sha256(sizes.encode() + weights.numpy().tobytes()).hexdigest()[:16]
