"""What must hold of a ring after every step, whatever was written and evicted."""

from __future__ import annotations

import torch

from ringkv.engine.ring.storage import Ring


def check_integrity(ring: Ring) -> None:
    """Assert what must hold after every step, reading the device.

    Raises:
        AssertionError: naming the invariant, the layer and the lane.
    """
    config, order = ring.config, ring.order
    slots = torch.arange(config.capacity, dtype=torch.int32, device=order.device)
    assert torch.equal(order.sort(-1).values, slots.expand_as(order)), "order is not a permutation of the slots"
    assert (ring.count.cpu().numpy() == ring.counts).all(), "the host's counts differ from the device's"
    assert (ring.evictions.cpu().numpy() == ring.evicted).all(), "the host's evictions differ from the device's"
    position = ring.position.gather(3, order.long())
    for layer in range(ring.layers):
        for lane in range(ring.lanes):
            where, count, seen = f"layer {layer}, lane {lane}", int(ring.counts[layer, lane]), int(ring.seen[lane])
            assert count <= config.capacity, f"{where}: {count} live tokens, capacity {config.capacity}"
            live, free = position[layer, lane, :, :count], position[layer, lane, :, count:]
            assert (free == -1).all(), f"{where}: a free slot is marked live"
            assert (live >= 0).all(), f"{where}: a live slot is marked free"
            assert (live.diff(dim=-1) > 0).all(), f"{where}: live positions do not ascend"
            if not count or not seen:  # it was left before its prompt was read
                continue
            assert (live < seen).all(), f"{where}: a live position lies in the future"
            head = min(max(config.sinks, int(ring.pin[lane])), seen)
            assert (live[:, :head] == slots[:head]).all(), f"{where}: a sink or pinned token is gone"
            recent = min(config.window, seen)
            wanted = torch.arange(seen - recent, seen, device=live.device)
            assert (live[:, count - recent :] == wanted).all(), f"{where}: a window token is gone"
