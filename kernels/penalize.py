"""What changes the logits of a lane before its temperature does."""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    bias: Tensor | None = None,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    in_prompt: Tensor | None = None,
    in_output: Tensor | None = None,
    ending: Tensor | None = None,
    early: Tensor | None = None,
) -> Tensor:
    """Bias, then repetition penalty, then presence penalty, then ids that may not come yet. None leaves a stage out.

    Args:
        logits: float [B, V].
        bias: float32 [B, V], added.
        repetition: float32 [B] >= 0; a logit of an id that occurred in prompt or output is divided by it if positive,
            multiplied if not (CTRL, arXiv 1909.05858). 1 is off.
        presence: float32 [B], subtracted once from the logit of each id that occurred in the output.
        in_prompt, in_output: bool [B, V], ids that occurred.
        ending: bool [B, V], ids that may not be drawn in the lanes that are ``early``, bool [B].

    Returns:
        float [B, V], a new tensor where anything is applied.
    """
    if bias is not None:
        logits = logits + bias
    if repetition is not None and in_prompt is not None and in_output is not None:
        factor = repetition[:, None]
        punished = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(in_prompt | in_output, punished, logits)
    if presence is not None and in_output is not None:
        logits = logits - presence[:, None] * in_output
    if ending is not None and early is not None:
        logits = logits.masked_fill(ending & early[:, None], -torch.inf)
    return logits
