"""The step: every running lane reads one token and draws the next. Tensors only; requests live in ``engine.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.engine.retention import last_attention
from ringkv.engine.ring.admit import admit
from ringkv.engine.ring.evict import evict_due
from ringkv.engine.ring.storage import Ring
from ringkv.engine.sampling.device import Sampler
from ringkv.engine.sampling.steering import Steering
from ringkv.kernels.blocks import pausing
from ringkv.kernels.table import attend, causal_attention, commit
from ringkv.models.decoder import Decoder, Layer

UNRANKED = -2
# Layers done, layers in all: called after each, and now and then in a long one; may raise to stop the prefill.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Drawn:
    """What a step drew, a row a lane.

    Attributes:
        tokens: ids; -1 for a row that was not finite, or that does not run; ``UNRANKED`` for one whose policy gave NaN.
        forced: which of them the model did not choose; None: none.
        logprobs: of the tokens, before any processing; None where no lane wants them.
        top_ids, top_logprobs: the likeliest tokens of each row, the likeliest first.
    """

    tokens: list[int]
    forced: list[bool] | None = None
    logprobs: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None

    @classmethod
    def of(cls, fields: Sequence[Tensor | None]) -> Drawn:
        """From tensors in the order of the fields; reads them."""
        values: list[Any] = [None if field is None else field.tolist() for field in fields]
        return cls(*values)

    def logprob(self, row: int, k: int) -> dict[str, Any] | None:
        """{id, logprob, top: [[id, logprob] x k]} of a row; None where it was not computed."""
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return None
        top = [list(pair) for pair in zip(self.top_ids[row][:k], self.top_logprobs[row][:k], strict=True)]
        return {"id": self.tokens[row], "logprob": self.logprobs[row], "top": top}


class Runner:
    """Prefills lanes of a ring and steps them together.

    Args:
        model: the decoder.
        ring: its storage.
        sampler: draws the tokens of each lane.
        steering: forces tokens where a thought must close.
    """

    def __init__(self, model: Decoder, ring: Ring, sampler: Sampler, steering: Steering) -> None:
        self.model, self.ring, self.sampler, self.steering = model, ring, sampler, steering
        self._flying: deque[Drawn] = deque()
        # Above four lanes a product's rows are only independent of their place in multiples of four (float32, CPU).
        self._padding = -ring.lanes % 4 if ring.lanes > 4 else 0

    @torch.inference_mode()
    def prefill(self, lane: int, ids: Sequence[int] | Tensor, progress: Progress | None = None) -> Tensor:
        """Read a prompt into a lane that was reset, one layer at a time; returns the last token's logits [1, V].

        A layer's keys and values for the whole prompt exist only while that layer runs, so a prompt may be longer than
        the ring.
        """
        model, ring, n = self.model, self.ring, len(ids)
        angles = model.angles(torch.arange(n, device=model.device), n)
        done = 0

        def tell() -> None:
            if progress is not None:
                progress(done, model.config.layers)

        def attention(layer: Layer, qkv: Tensor) -> Tensor:
            nonlocal done
            q, k, v = model.split(layer, qkv, angles[layer.index])
            out = causal_attention(q, k, v, ring.scratch)
            let_in = ring.retention.keep(layer.index, n, lambda: last_attention(q[-1], k))
            admit(ring, layer.index, lane, q, k, v, let_in)
            done = layer.index + 1
            tell()
            return out

        with pausing(tell):
            hidden = model.forward(torch.as_tensor(ids, device=model.device), attention)
        ring.start(lane, n)
        return model.logits(hidden[-1:])

    def lane(self, lane: int) -> dict[str, Tensor]:
        """Views of all that a lane holds, by name: of the ring and of the steering. ``put`` takes such tensors back."""
        return self.ring.lane(lane) | self.steering.lane(lane)

    def put(self, lane: int, held: Mapping[str, Tensor], seed: int, sample: int) -> None:
        """Let a lane go on where the one did that held this; see ``Ring.put``."""
        self.ring.put(lane, held, seed, sample)
        self.steering.put(lane, held)

    @torch.inference_mode()
    def read(self, lane: int, ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Read tokens into a running lane, one at a time as a step does, while the others stand still.

        Args:
            ids: at least one.
            progress: called with (tokens done, tokens in all) after each; may raise to stop.

        Returns:
            The last token's logits [1, V].
        """
        others = [other for other in self.ring.running if other != lane]
        for other in others:
            self.ring.stop(other)
        try:
            for done, token in enumerate(ids, 1):
                logits = self.forward(torch.full_like(self.ring.next_token, token))
                if progress is not None:
                    progress(done, len(ids))
            return logits[lane : lane + 1].clone()
        finally:
            for other in others:
                self.ring.run(other, True)

    @torch.inference_mode()
    def first(self, lane: int, logits: Tensor, opens: bool = True) -> Drawn:
        """Draw a lane's next token from the logits [1, V] of what was read last.

        Args:
            opens: whether it is the first of its text.
        """
        token, forced = self._next(logits, [lane], opens)
        self.ring.next_token[lane] = token[0]
        return Drawn.of(self._outcome(_told(token, self.ring.unranked[lane]), forced, logits))

    latency = 0  # steps that may be launched before the tokens of one are read

    @torch.inference_mode()
    def launch(self) -> None:
        """Launch a step, one token for every running lane, and evict where it filled a layer; ``collect`` reads it."""
        outcome = self._outcome(*self.device_step())
        self.after_step()
        self._flying.append(Drawn.of(outcome))

    def collect(self) -> Drawn:
        """The tokens of the oldest step that was launched and not collected."""
        return self._flying.popleft()

    def step(self) -> Drawn:
        """Launch a step and read it."""
        self.launch()
        return self.collect()

    def drain(self) -> None:
        """Forget the steps that were launched and not collected."""
        self._flying.clear()

    def after_step(self) -> None:
        """What the host does once a step is launched: follow it in its mirrors, and evict where a layer is full."""
        self.ring.follow()
        evict_due(self.ring)

    def device_step(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """All of a step that is the device's: the tokens [B], which were forced [B], the logits [B, V]."""
        ring = self.ring
        logits = self._forward(ring.next_token)
        token, forced = self._next(logits)
        return _told(commit(token, ring.active, ring.next_token), ring.unranked), forced, logits

    def _next(
        self, logits: Tensor, lanes: Sequence[int] | None = None, opens: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        token, forced = self.steering.apply(self.sampler.draw(logits, self.ring, lanes, opens), lanes)
        self.sampler.note(token, lanes)
        return token, forced

    def _outcome(self, token: Tensor, forced: Tensor | None, logits: Tensor) -> list[Tensor | None]:
        """The fields of ``Drawn``, on the device."""
        k = self.sampler.logprobs
        if k is None:
            return [token, forced]
        logprob = logits.log_softmax(-1)
        top = logprob.topk(k, sorted=True)
        own = logprob.gather(1, token.clamp(min=0)[:, None])[:, 0]
        return [token, forced, own, top.indices, top.values]

    @torch.inference_mode()
    def forward(self, token: Tensor) -> Tensor:
        """A step that draws nothing: append ``token`` [B] to the running lanes; returns the next logits [B, V]."""
        logits = self._forward(token)
        self.after_step()
        return logits

    def forward_alone(self, token: Tensor) -> Tensor:
        """``forward`` where no lane, running or not, holds a request: what lanes draw with may change."""
        return self.forward(token)

    def _forward(self, token: Tensor) -> Tensor:
        """The device's part of ``forward``."""
        model, ring = self.model, self.ring
        angles = model.angles(ring.seen, ring.seen + 1)

        def attention(layer: Layer, qkv: Tensor) -> Tensor:
            own = qkv[: ring.lanes] if self._padding else qkv
            view = ring.views[layer.index]
            out = attend(own, layer.qk_norms, model.config.rms_eps, angles[layer.index], view)
            return F.pad(out, (0, 0, 0, self._padding)) if self._padding else out

        ids = token.clamp(min=0)
        hidden = model.forward(F.pad(ids, (0, self._padding)) if self._padding else ids, attention)
        ring.advance()
        return model.logits(hidden)[: ring.lanes]


def _told(token: Tensor, unranked: Tensor) -> Tensor:
    """The tokens as the host reads them: of a lane whose policy gave NaN, ``UNRANKED``."""
    return token.where(unranked == 0, UNRANKED)
