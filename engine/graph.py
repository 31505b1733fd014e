"""The step as one CUDA graph: captured once over all lanes, replayed for ever, its tokens read one step late."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringkv.engine.ring.evict import warm_up
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Drawn, Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.backend import path_of
from ringkv.models.decoder import Decoder
from ringkv.models.moe import FEW_ROWS

Outputs = tuple[Tensor, Tensor | None, Tensor]  # tokens [B], which were forced [B], logits [B, V]
DeviceStep = Callable[[], Outputs]
WARM_UP = 3


@dataclass(frozen=True)
class Flight:
    """A launched step on its way to the host: the fields of ``Drawn`` in host memory, and the event after them."""

    fields: list[Tensor | None]
    landed: torch.cuda.Event | None


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream that graphs of a device are made on: cuBLAS takes a workspace for every stream that it meets."""
    return torch.cuda.Stream(device)


def capture(step: DeviceStep) -> DeviceStep:
    """``step`` as a CUDA graph: calling it replays the graph; what it returns are always the same tensors."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles and loads what cannot be while a graph is captured.
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # What other threads do with the device meanwhile is their own affair.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = step()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


class GraphRunner(Runner):
    """A runner that launches a step as one graph, evicts between replays, and reads the tokens one step late.

    Nothing in the loop waits for the device but the reading of tokens. Build it while no lane runs: what warms up and
    what is captured then writes nothing.

    Args:
        model, ring, steering: as of ``Runner``.
        sampler: a static one.
        captured: makes the graph; anything that returns a callable will do where there is no GPU.
    """

    latency = 1

    def __init__(
        self,
        model: Decoder,
        ring: Ring,
        sampler: Sampler,
        steering: Steering,
        captured: Callable[[DeviceStep], DeviceStep] = capture,
    ) -> None:
        super().__init__(model, ring, sampler, steering)
        assert not ring.running
        self._flights: deque[Flight] = deque()
        self._cuda = model.device.type == "cuda"
        # Two sets of host buffers: the device fills one while the host reads the other.
        self._buffers: deque[dict[int, Tensor]] = deque([{}, {}])
        with torch.inference_mode(), torch.cuda.device_of(ring.k):
            self._replay = captured(self.device_step)
            warm_up(ring)

    @torch.inference_mode()
    def launch(self) -> None:
        """Launch a step; ``collect`` gives its tokens. No more than two may be on their way."""
        assert len(self._flights) <= self.latency
        outcome = self._outcome(*self._replay())
        self._buffers.rotate()
        fields = [None if field is None else self._to_host(i, field) for i, field in enumerate(outcome)]
        landed = None
        if self._cuda:
            landed = torch.cuda.Event()
            landed.record(torch.cuda.current_stream(self.model.device))
        self._flights.append(Flight(fields, landed))
        self.after_step()

    def collect(self) -> Drawn:
        """The tokens of the oldest step that was launched and not collected."""
        flight = self._flights.popleft()
        if flight.landed is not None:
            flight.landed.synchronize()
        return Drawn.of(flight.fields)

    def drain(self) -> None:
        """Forget the steps that were launched and not collected."""
        self._flights.clear()

    def _to_host(self, i: int, field: Tensor) -> Tensor:
        """A copy of field ``i`` that lands in a pinned buffer some time later."""
        buffer = self._buffers[0].get(i)
        if buffer is None or buffer.shape != field.shape:
            buffer = torch.empty(field.shape, dtype=field.dtype, pin_memory=self._cuda)
            self._buffers[0][i] = buffer
        return buffer.copy_(field, non_blocking=True)


def make_runner(model: Decoder, ring: Ring, vocabulary: int, tags: tuple[int, int] | None) -> Runner:
    """The runner that suits where the model lies: a captured step on a GPU with kernels, else an eager one.

    Args:
        vocabulary: ids that may be drawn.
        tags: the ids that open and close a thought, or None.
    """
    steering = Steering(ring.lanes, tags, model.device)
    # More tokens than this go through a mixture of experts one expert at a time, and the host reads which.
    dynamic = model.config.moe is not None and ring.lanes > FEW_ROWS
    if model.device.type == "cuda" and path_of(ring.k) == "triton" and not dynamic:
        return GraphRunner(model, ring, Sampler(ring.lanes, vocabulary, model.device, static=True), steering)
    return Runner(model, ring, Sampler(ring.lanes, vocabulary, model.device), steering)
