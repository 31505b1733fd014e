"""Bias, penalties and blocked ids in one pass over the logits."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _penalize(
    logits, bias, repetition, presence, in_prompt, in_output, ending, early, out, width, stride,
    HAS_BIAS: tl.constexpr, HAS_REPETITION: tl.constexpr, HAS_PRESENCE: tl.constexpr, HAS_ENDING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    cell = lane * width + at
    value = tl.load(logits + lane * stride + at, mask=mask, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + cell, mask=mask, other=0.0)
    # A lane that does not use a stage does not read its tables.
    if HAS_REPETITION:
        factor = tl.load(repetition + lane)
        if factor != 1.0:
            occurred = tl.load(in_prompt + cell, mask=mask, other=0) | tl.load(in_output + cell, mask=mask, other=0)
            punished = tl.where(value > 0, value / factor, value * factor)
            value = tl.where(occurred != 0, punished, value)
    if HAS_PRESENCE:
        amount = tl.load(presence + lane)
        if amount != 0.0:
            occurred = tl.load(in_output + cell, mask=mask, other=0) != 0
            value = tl.where(occurred, value - amount, value)
    if HAS_ENDING:  # noqa: SIM102 - a constant, decided when compiling
        if tl.load(early + lane) != 0:
            value = tl.where(tl.load(ending + cell, mask=mask, other=0) != 0, float("-inf"), value)
    tl.store(out + cell, value, mask=mask)


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
    """See ``penalize.penalize``; always a new tensor, contiguous."""
    assert logits.stride(1) == 1
    for table in (bias, in_prompt, in_output, ending):
        assert table is None or table.is_contiguous()
    lanes, width = logits.shape
    out = torch.empty(lanes, width, dtype=logits.dtype, device=logits.device)
    any_output = in_output is not None
    _penalize[(lanes, triton.cdiv(width, BLOCK))](
        logits, bias, repetition, presence, in_prompt, in_output, ending, early, out, width, logits.stride(0),
        bias is not None, repetition is not None and in_prompt is not None and any_output,
        presence is not None and any_output, ending is not None, BLOCK,
    )  # fmt: skip
    return out
