"""The step as one CUDA graph: captured once over all lanes, replayed for ever, its tokens read one step late."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringkv.engine.ring.admit import admit
from ringkv.engine.ring.evict import evict_once
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Drawn, Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.errors import RingkvError
from ringkv.kernels.backend import path_of
from ringkv.models.decoder import Decoder
from ringkv.models.moe import FEW_ROWS

Outputs = tuple[Tensor, Tensor | None, Tensor]  # tokens [B], which were forced [B], logits [B, V]
DeviceStep = Callable[[], Outputs]
WARM_UP = 3
SLOW = 3.0  # seconds that a start may take before it says what it does
COMPILING = "compiling the kernels for this model on this GPU: up to a minute at the first start, kept for later ones"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A launched step on its way to the host: the fields of ``Drawn`` in host memory, and the event after them."""

    fields: list[Tensor | None]
    landed: torch.cuda.Event | None


_captured_on: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()  # streams of the graphs that live


def _own_stream() -> torch.cuda.Stream:
    """A stream of the current device that no living graph was captured on.

    A graph that ends clears the cuBLAS workspaces of its stream, so two graphs must not share one. torch hands out its
    32 streams of a device in turn.
    """
    for _ in range(64):
        stream = torch.cuda.Stream()
        if stream not in _captured_on:
            _captured_on.add(stream)
            return stream
    raise RingkvError("engine: every stream of this GPU holds the captured step of an open engine; close some of them")


def capture(step: DeviceStep) -> DeviceStep:
    """``step`` as a CUDA graph: calling it replays the graph; what it returns are always the same tensors.

    The stream of the capture is the graph's own for as long as the graph lives.
    """
    stream = _own_stream()
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

    def replay(owner: torch.cuda.Stream = stream) -> Outputs:  # holds it
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
        slow = threading.Timer(SLOW, log.warning, [COMPILING])
        slow.start()
        try:
            with torch.inference_mode(), torch.cuda.device_of(ring.k):
                self._replay = captured(self.device_step)
                self._warm_up()
        finally:
            slow.cancel()

    def _warm_up(self) -> None:
        """Compile what is launched outside the graph: a lane's first draw, evictions, and what prompts are ranked by.

        Idle lane 0 is used for it, and is empty afterwards.
        """
        model, ring, config = self.model, self.ring, self.model.config
        evict_once(ring)
        n = ring.config.capacity + 1 if ring.policy.evicts else 1
        widths = (config.heads + 2 * config.kv_heads) * config.head_dim
        qkv = torch.zeros(n, widths, dtype=model.dtype, device=model.device)
        angles = model.angles(torch.arange(n, device=model.device), n)[0]
        admit(ring, 0, 0, *model.split(model.layers[0], qkv, angles), None)
        hidden = torch.zeros(1, config.hidden_size, dtype=model.dtype, device=model.device)
        self.steering.apply(self.sampler.draw(model.logits(hidden), ring, [0]), [0])
        ring.reset(0, seed=0)

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

    @torch.inference_mode()
    def forward_alone(self, token: Tensor) -> Tensor:
        """As of ``Runner``: a replay, whose draw is not used."""
        self.ring.next_token.copy_(token)
        running = self.ring.active.clone()
        logits = self._replay()[2].clone()
        self.ring.active.copy_(running)  # a draw stops a lane whose row is not finite
        self.after_step()
        return logits

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
