"""The device's part of a thought: its budget, and the tokens that close it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringkv.kernels.steer import AFTER, BEFORE, IDLE, INSIDE, NEXT
from ringkv.kernels.table import steer

QUEUE = 256  # tokens of a closing message, its close id included


class Steering:
    """The state of every lane that takes effect in the step itself, without the host.

    Args:
        lanes: how many.
        tags: the ids that open and close a thought, or None where the model has no single tokens for them.
        device: where.
    """

    def __init__(self, lanes: int, tags: tuple[int, int] | None, device: torch.device) -> None:
        self.tags = tags
        self.queue = torch.zeros(lanes, QUEUE, dtype=torch.int64, device=device)
        self.length, self.cursor, self.left, self.phase = (
            torch.full((lanes,), value, dtype=torch.int64, device=device) for value in (0, IDLE, -1, AFTER)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(table.nbytes for table in (self.queue, self.length, self.cursor, self.left, self.phase))

    def set(self, lane: int, inside: bool, budget: int | None, message: Sequence[int]) -> None:
        """A new request: whether its prompt ends inside a thought, its thought budget, what closes the thought."""
        self.cursor[lane], self.left[lane], self.phase[lane] = IDLE, -1, AFTER
        if self.tags is None:
            return
        closing = [*message, self.tags[1]]
        assert len(closing) <= QUEUE
        self.queue[lane, : len(closing)] = torch.tensor(closing, device=self.queue.device)
        self.length[lane] = len(closing)
        self.phase[lane] = INSIDE if inside else BEFORE
        self.left[lane] = -1 if budget is None else budget
        if inside and budget == 0:
            self.cursor[lane] = 0

    def close(self, lane: int, behind: int) -> None:
        """Close the thought after one more token of the model's; ``behind``: steps launched since the last one seen."""
        self.cursor[lane] = NEXT if behind == 0 else 0

    def apply(self, token: Tensor, lanes: Sequence[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """The tokens [b] that really follow, of these lanes or of all, and which were forced (None: never any)."""
        if self.tags is None:
            return token, None
        if lanes is None:
            return steer(token, self.queue, self.length, self.cursor, self.left, self.phase, *self.tags)
        at = torch.tensor(lanes, device=token.device)
        cursor, left, phase = self.cursor[at], self.left[at], self.phase[at]
        steered = steer(token, self.queue[at], self.length[at], cursor, left, phase, *self.tags)
        self.cursor[at], self.left[at], self.phase[at] = cursor, left, phase
        return steered
