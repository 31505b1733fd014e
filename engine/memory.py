"""What an engine takes of the memory, known from its configuration before a weight is loaded.

Nothing is estimated by formula: decoder and ring are built on the meta device, where a tensor has a shape and no data,
and the real prefill runs there while its live tensors are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.engine.config import RingConfig
from ringkv.engine.host_memory import free_memory
from ringkv.engine.live_bytes import LiveBytes
from ringkv.engine.policies import Policy
from ringkv.engine.retention import Retention
from ringkv.engine.ring.storage import Ring
from ringkv.engine.runner import Runner
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.errors import MOST, RingkvError, size
from ringkv.kernels.backend import use
from ringkv.kernels.table import silu_mul
from ringkv.models.config import ModelConfig
from ringkv.models.decoder import Decoder
from ringkv.models.moe import FEW_ROWS, SparseMlp

META = torch.device("meta")
PROMPT = 4096  # tokens of the prompt that "auto" leaves room for
MOST_BUDGET, MOST_LANES = 16384, 16  # what "auto" chooses at most
HISTOGRAM_BYTES = 3 << 14  # a lane's, of one filter: 2,048 bins of 8 bytes for each of three digits
SPARE = 0.1  # the share of the free memory that "auto" leaves alone


@dataclass(frozen=True)
class Table:
    """A tensor of the ring: its shape, its type, its bytes."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Bytes of an engine.

    Attributes:
        budget, window, lanes: what was planned. dtype: of weights, activations and ring.
        weights_bytes, ring_bytes, scratch_bytes: what the engine holds as long as it lives, to the byte.
        load_bytes: weights at the worst moment of loading, before there is a ring: more than ``weights_bytes`` where
            they are packed, since a product is read in float32 first.
        step_bytes: what a step captured on a GPU holds beside these; 0 where none is (see ``Planner.step_bytes``).
        prompt_tokens, prefill_bytes: live tensors at the worst moment of reading such a prompt, beside the above; an
            upper bound, since what retention and routing choose is only known from the data.
        token_bytes: keys and values of one token in a cache that keeps all, one lane.
        tables: what ``ring_bytes`` is the sum of.
    """

    budget: int
    window: int
    lanes: int
    dtype: str
    weights_bytes: int
    load_bytes: int
    ring_bytes: int
    scratch_bytes: int
    step_bytes: int
    prompt_tokens: int
    prefill_bytes: int
    token_bytes: int
    tables: Mapping[str, Table]

    @property
    def total_bytes(self) -> int:
        """All of it at the worst moment."""
        held = self.weights_bytes + self.ring_bytes + self.scratch_bytes + self.step_bytes
        return max(self.load_bytes, held + self.prefill_bytes)

    def full_cache_bytes(self, tokens: int) -> int:
        """Keys and values of all lanes where nothing is ever evicted."""
        return self.token_bytes * tokens * self.lanes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"total_bytes": self.total_bytes}


class Planner:
    """Plans engines of one model.

    Args:
        model: its configuration.
        dtype: of weights, activations and ring.
        packed: the weights of the products and the embedding are float16 instead (see ``Decoder``).
        prompt: tokens of the prompt whose prefill must fit too.
        captured: the step is captured, as on a GPU.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        prompt: int = PROMPT,
        packed: bool = False,
        captured: bool = False,
    ) -> None:
        self.model, self.dtype, self.prompt, self.captured = model, dtype, prompt, captured
        decoder = Decoder(model, META, dtype, packed=packed)
        unpacked = decoder.nbytes
        with LiveBytes() as live:
            if packed:
                decoder.fill(lambda name, view: None)
        self.weights_bytes, self.load_bytes = decoder.nbytes, unpacked + live.peak
        self._started: tuple[Policy, dict[str, Tensor]] | None = None
        self._counted: tuple[RingConfig, int, int] | None = None  # the last prefill

    def plan(self, config: RingConfig, lanes: int) -> Plan:
        """The figures of an engine with this ring."""
        ring = self._ring(config, lanes)
        return Plan(
            budget=config.budget_tokens,
            window=config.window,
            lanes=lanes,
            dtype=str(self.dtype).removeprefix("torch."),
            weights_bytes=self.weights_bytes,
            load_bytes=self.load_bytes,
            ring_bytes=ring.nbytes,
            scratch_bytes=ring.scratch.nbytes,
            step_bytes=self.step_bytes(lanes),
            prompt_tokens=self.prompt,
            prefill_bytes=self.prefill_bytes(config),
            token_bytes=(ring.k.nbytes + ring.v.nbytes) // (config.capacity * lanes),
            tables={
                name: Table(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.nbytes)
                for name, x in ring.tensors().items()
            },
        )

    def held_bytes(self, config: RingConfig, lanes: int) -> int:
        """Ring, scratch and step."""
        ring = self._ring(config, lanes)
        return ring.nbytes + ring.scratch.nbytes + self.step_bytes(lanes)

    def most_lanes(self, config: RingConfig, memory: int, most: int) -> int:
        """How many lanes fit in so many bytes, weights and prefill included; at most ``most``, 0 if not even one."""
        if self.load_bytes > memory:
            return 0
        left = memory - self.weights_bytes - self.prefill_bytes(config)
        return _largest(lambda lanes: self.held_bytes(config, lanes), left, most)

    def most_budget(self, config: RingConfig, lanes: int, memory: int, most: int) -> int:
        """The largest budget that so many lanes may have; at most ``most``, 0 if none that the ring accepts fits."""

        def taken(more: int) -> int:
            sized = replace(config, budget=before + more)
            held = self.weights_bytes + self.held_bytes(sized, lanes)
            return max(self.load_bytes, held + self.prefill_bytes(sized))

        before = config.least_budget - 1
        more = _largest(taken, memory, most - before)
        return before + more if more else 0

    def step_bytes(self, lanes: int) -> int:
        """What a captured step holds: tables that never move, and in the graph's pool what lives at once at the most.

        That is a layer, or three numbers for every token of the vocabulary (logits, penalised logits, probabilities)
        with two histograms. The blocks that torch's allocator takes for it are larger, by up to 40 MiB in all.
        """
        if not self.captured or (self.model.moe is not None and lanes > FEW_ROWS):
            return 0
        size = self.model.vocab_size
        tables = Sampler(lanes, size, META, static=True).nbytes + Steering(lanes, None, META).nbytes
        small = self._small()
        decoder = Decoder(small, META, self.dtype)
        with LiveBytes() as live, torch.inference_mode():
            ids = torch.empty(lanes, dtype=torch.int64, device=META)
            width = small.heads * small.head_dim
            decoder.logits(decoder.forward(ids, lambda layer, qkv: qkv.new_empty(len(qkv), width)))
        drawing = lanes * (3 * size * 4 + 2 * HISTOGRAM_BYTES)
        return tables + max(live.peak, drawing)

    def _small(self) -> ModelConfig:
        """A model that tells: from the second layer on all are alike, and the last is sparse where some are dense."""
        moe = self.model.moe
        layers = min(2 if moe is None else 3, self.model.layers)
        if moe is not None and moe.layers:
            sparse = range(layers) if len(moe.layers) == self.model.layers else (layers - 1,)
            moe = replace(moe, layers=tuple(sparse))
        return replace(self.model, layers=layers, moe=moe, nope_layers=self.model.nope_layers and (0,))

    def prefill_bytes(self, config: RingConfig, prompt: int | None = None) -> int:
        """Live tensors at the peak of a prefill, beside weights, ring and scratch.

        Args:
            prompt: its tokens; None are those that this plans for.

        Raises:
            MemoryError: the ring cannot take so long a prompt in, whatever the memory.
        """
        n = prompt or self.prompt
        if not config.policy.evicts:  # a longer one is refused
            n = min(n, config.capacity)
        if self._counted is not None and self._counted[:2] == (config, n):
            return self._counted[2]
        decoder = self._prefilled
        small = decoder.config
        ring = self._ring(config, 1, small)
        ring.retention = _KeepsAll(ring.retention, self.model.layers - 1)
        runner = Runner(decoder, ring, Sampler(1, small.vocab_size, META), Steering(1, None, META))
        ring.reset(0, seed=0)
        with use("torch"), LiveBytes() as live:  # whatever the backend of an engine that asks while it is at work
            runner.prefill(0, torch.empty(n, dtype=torch.int64, device=META))
        self._counted = config, n, live.peak
        return live.peak

    def longest_prompt(self, config: RingConfig, memory: int) -> int:
        """The tokens of the longest prompt that can be read in so many bytes, beside what the engine holds; to 1%."""

        def taken(prompt: int) -> float:
            try:
                return self.prefill_bytes(config, prompt)
            except MemoryError:
                return math.inf

        return _largest(taken, memory, MOST if config.policy.evicts else config.capacity, near=0.01)

    @cached_property
    def _prefilled(self) -> Decoder:
        """A small decoder that takes as much memory as it can."""
        decoder = Decoder(self._small(), META, self.dtype)
        for layer in decoder.layers:
            if isinstance(layer.mlp, SparseMlp):
                layer.mlp = _OneExpert(layer.mlp)  # type: ignore[assignment]
        return decoder

    def _ring(self, config: RingConfig, lanes: int, model: ModelConfig | None = None) -> Ring:
        """A ring of this model, or of one that has its first layers; a policy is asked once what it starts with."""
        policy, model = config.policy, model or self.model
        if self._started is None or self._started[0] is not policy:
            self._started = policy, {name: x.to(META) for name, x in policy.start(self.model).items()}
        start = {name: x[: model.layers] for name, x in self._started[1].items()}
        return Ring(model, config, lanes, META, self.dtype, start)


def settle(
    model: ModelConfig,
    ring: RingConfig,
    lanes: int | str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    loaded: bool = False,
    packed: bool = False,
    free: int | None = None,
) -> tuple[RingConfig, int]:
    """Choose what is "auto", and refuse what the free memory cannot hold.

    budget "auto" is the largest that fits, up to 16384, for the given lanes (one, where they are "auto" too); lanes
    "auto" as many as then fit, up to 16. Both leave room for the prefill of a prompt of 4096 tokens, and a tenth of the
    free memory alone.

    Args:
        dtype: of activations and ring. packed: the weights are float16 (see ``Decoder``).
        loaded: the weights are in memory already.
        free: bytes to fit into; None is what is free on the device.

    Raises:
        RingkvError: with the arithmetic.
    """
    planner = Planner(model, dtype, packed=packed, captured=device.type == "cuda")
    if free is None:
        if "auto" in (ring.budget, lanes):  # for this torch loads libraries, whose memory is then not free
            planner.prefill_bytes(replace(ring, budget=ring.least_budget))
        free = free_memory(device)
    if loaded:
        planner.weights_bytes = planner.load_bytes = 0
    if "auto" in (ring.budget, lanes):
        if free is None:
            raise RingkvError("auto: this system does not tell its free memory; give budget and lanes as ints")
        room = int(free * (1 - SPARE))
        if ring.budget == "auto":
            first = 1 if isinstance(lanes, str) else lanes
            ring = replace(ring, budget=planner.most_budget(ring, first, room, MOST_BUDGET) or ring.least_budget)
        if isinstance(lanes, str):
            lanes = max(1, planner.most_lanes(ring, room, MOST_LANES))
    assert isinstance(lanes, int)
    held = planner.held_bytes(ring, lanes)
    if free is not None and planner.load_bytes > free:
        weights = f"loading takes {size(planner.load_bytes)} for weights that then take {size(planner.weights_bytes)}"
        raise RingkvError(f"memory: {weights}, and {size(free)} are free on {device}")
    if free is not None and planner.weights_bytes + held > free:
        weights = f"weights {size(planner.weights_bytes)} + " * (not loaded)
        parts = "ring, scratch and step" if planner.captured else "ring and scratch"
        raise RingkvError(
            f"memory: {weights}{parts} {size(held)} (budget {ring.budget} + window {ring.window}, {lanes} "
            f"lane{'s' * (lanes > 1)}) = {size(planner.weights_bytes + held)}, and {size(free)} are free on {device}"
        )
    return ring, lanes


class _KeepsAll:
    """A retention that takes as much memory as another may, and keeps everything, the most it can."""

    name: ClassVar[str] = "all"

    def __init__(self, own: Retention, layer: int) -> None:
        self._own, self._layer = own, layer

    def keep(self, layer: int, n: int, last_attention: Callable[[], Tensor]) -> None:
        # It reads its result on the host, and here there is none; its tensors are counted up to there.
        with suppress(RuntimeError, NotImplementedError):
            self._own.keep(self._layer, n, last_attention)


class _OneExpert:
    """A sparse MLP in its worst case: every token of a block through the same expert."""

    def __init__(self, own: SparseMlp) -> None:
        self._own = own

    def __call__(self, x: Tensor) -> Tensor:
        weight, chosen = self._own.route(x)
        out, row, rank = torch.zeros_like(x), torch.zeros_like(chosen[:, 0]), torch.zeros_like(chosen[:, 0])
        h = F.linear(silu_mul(F.linear(x[row], self._own.gate_up[0])), self._own.down[0])
        return out.index_add_(0, row, h * weight[row, rank, None])


def _largest(taken: Callable[[int], float], memory: int, most: int, near: float = 0) -> int:
    """The largest of 1 .. most that takes no more than this, or one that is ``near``, as a share; 0 if none does.

    What is taken grows with the value, along a few straight lines, so that few values need be looked at.
    """
    if most < 1 or (below := taken(1)) > memory:
        return 0
    if (above := taken(most)) <= memory:
        return most
    low, high, turn = 1, most, 1
    growth = 0.0  # of the line between the last two values that take no more
    while high - low > max(1, near * low):
        guess = (low + high) // 2
        if turn % 3 and above < math.inf:  # where the line meets it, and then the next one; and now and then the middle
            guess = low + int((high - low) * (memory - below) / (above - below)) + turn % 3 - 1
        elif above == math.inf and (low == 1 or growth):  # no line leads there yet: follow the one from below
            guess = min(guess, PROMPT if low == 1 else low + int((memory - below) / growth) + 1)
            growth, turn = 0.0, 1
        guess = min(max(guess, low + 1), high - 1)
        here, turn = taken(guess), turn + 1
        if here <= memory:
            growth = (here - below) / (guess - low)
            low, below = guess, here
        else:
            high, above = guess, here
    return low
