"""What a policy remembers between evictions: tensors that the ring keeps for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ringkv.engine.policies import Policy, shown
from ringkv.errors import RingkvError


class PolicyState:
    """The declared state of a policy, for L layers, B lanes, H KV heads and S slots.

    Args:
        start: what the lanes of each layer start with, name -> [L, ...].

    Attributes:
        slots: name -> float32 [L, B, H, S], a value for every slot.
        lanes: name -> [L, B, ...].
    """

    def __init__(
        self, policy: Policy, start: Mapping[str, Tensor], shape: tuple[int, int, int, int], device: torch.device
    ) -> None:
        self.policy = policy
        self.start = {name: value.to(device) for name, value in start.items()}
        self.slots = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name in policy.slot_state}
        self.lanes = {name: torch.stack([value] * shape[1], 1) for name, value in self.start.items()}
        if self.slots.keys() & self.lanes.keys():
            raise RingkvError(f"policy {policy.name}: a name stands in both slot_state and lane_state")

    def __bool__(self) -> bool:
        return bool(self.slots or self.lanes)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return self.slots | self.lanes

    def reset(self, lane: int) -> None:
        """Forget a lane's request."""
        for values in self.slots.values():
            values[:, lane] = 0.0
        for name, start in self.start.items():
            self.lanes[name][:, lane] = start

    def clear(self, layer: Tensor, lane: Tensor, slot: Tensor) -> None:
        """Zero the values of P pairs' slots [P, H, w] that become free: what is written there next starts at 0."""
        for name, values in self.slots.items():
            own = values[layer, lane]
            self.slots[name][layer, lane] = own.scatter_(2, slot, 0.0)

    def gather(self, layer: Tensor, lane: Tensor, slot: Tensor) -> dict[str, Tensor]:
        """For P pairs, in the order of ``slot`` [P, H, n]."""
        slots = {name: values[layer, lane].gather(2, slot) for name, values in self.slots.items()}
        return slots | {name: values[layer, lane] for name, values in self.lanes.items()}

    def scatter(self, layer: Tensor, lane: Tensor, slot: Tensor, new: Mapping[str, Tensor]) -> None:
        """Write new values for P pairs, in the order of ``slot`` [P, H, n]."""
        for name, value in new.items():
            if name in self.slots:
                values = self.slots[name][layer, lane]
                self.slots[name][layer, lane] = values.scatter_(2, slot, value)
            else:
                self.lanes[name][layer, lane] = value

    def checked(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor], by: str) -> Mapping[str, Tensor]:
        """``new``, what the policy's method ``by`` returned for the state ``old``.

        Raises:
            RingkvError: no mapping, a name that was not declared, or another shape or dtype.
        """
        if not isinstance(new, Mapping):
            raise RingkvError(f"policy {self.policy.name}: {by} returned {type(new).__name__}, accepted is a mapping")
        for name, value in new.items():
            if name not in old:
                known = ", ".join(old)
                raise RingkvError.bad(f"policy {self.policy.name}: {by}", name, f"what it declares: {known}")
            given, wanted = shown(value), shown(old[name])
            if given != wanted:
                raise RingkvError(f"policy {self.policy.name}: {by} gave {name} as {given}, accepted is {wanted}")
        return new
