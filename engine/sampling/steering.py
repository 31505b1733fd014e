"""The device's part of a thought: its budget, and the tokens that close it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def tensors(self) -> dict[str, Tensor]:
        """All of its tensors by name, [B, ...]."""
        return {name: getattr(self, name) for name in ("queue", "length", "cursor", "left", "phase")}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(table.nbytes for table in self.tensors().values())

    def lane(self, lane: int) -> dict[str, Tensor]:
        """Views of what one lane has of them."""
        return {f"steering.{name}": table[lane] for name, table in self.tensors().items()}

    def put(self, lane: int, held: Mapping[str, Tensor]) -> None:
        """Go on as the lane did whose values these are."""
        for name, own in self.lane(lane).items():
            own.copy_(held[name])

    def change(self, lane: int, phase: int, left: int, message: Sequence[int]) -> None:
        """Go on with another thought budget or message, or after tokens that were put in; a queue that runs runs on.

        Args:
            phase: BEFORE, INSIDE or AFTER the thought.
            left: tokens that the budget still allows the thought; negative is no budget.
            message: as of ``set``.
        """
        if self.tags is None:
            return
        idle = int(self.cursor[lane]) == IDLE
        if idle:
            self._write(lane, message)
        self.phase[lane], self.left[lane] = phase, left
        if phase != INSIDE:
            self.cursor[lane] = IDLE
        elif idle and left == 0:
            self.cursor[lane] = 0

    def broken(self, held: Mapping[str, Tensor], vocabulary: int) -> str | None:
        """What of a lane's values, which a file may have held, cannot be; None if nothing is wrong."""
        queue, length, cursor, left, phase = (held[name] for name in self.lane(0))
        right = {
            "queue": bool(((queue >= 0) & (queue < vocabulary)).all()),
            "length": 0 <= int(length) <= QUEUE,
            "cursor": NEXT <= int(cursor) < max(0, int(length)),
            "left": int(left) >= -1,
            "phase": int(phase) in (BEFORE, INSIDE, AFTER),
        }
        return next((f"steering.{name}" for name, fine in right.items() if not fine), None)

    def set(self, lane: int, inside: bool, budget: int | None, message: Sequence[int]) -> None:
        """A new request: whether its prompt ends inside a thought, its thought budget, what closes the thought."""
        self.cursor[lane], self.left[lane], self.phase[lane] = IDLE, -1, AFTER
        if self.tags is None:
            return
        self._write(lane, message)
        self.phase[lane] = INSIDE if inside else BEFORE
        self.left[lane] = -1 if budget is None else budget
        if inside and budget == 0:
            self.cursor[lane] = 0

    def _write(self, lane: int, message: Sequence[int]) -> None:
        """What closes the thought of a lane, with the tag."""
        assert self.tags is not None
        closing = [*message, self.tags[1]]
        assert len(closing) <= QUEUE
        self.queue[lane, : len(closing)] = torch.tensor(closing, device=self.queue.device)
        self.length[lane] = len(closing)

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
