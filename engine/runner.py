"""The step: every running lane reads one token and draws the next. Tensors only; requests live in ``engine.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.engine.retention import last_attention
from ringkv.engine.ring import Ring
from ringkv.engine.sampling import Sampler
from ringkv.kernels.prefill_attention import causal_attention
from ringkv.models.decoder import Decoder, Layer

Progress = Callable[[int, int], None]  # layers done, layers in all; may raise to stop the prefill


class Runner:
    """Prefills lanes of a ring and steps them together.

    Args:
        model: the decoder.
        ring: its storage.
        sampler: draws the tokens of each lane.
    """

    def __init__(self, model: Decoder, ring: Ring, sampler: Sampler) -> None:
        self.model, self.ring, self.sampler = model, ring, sampler
        # Above four lanes a product's rows are only independent of their place in multiples of four (float32, CPU).
        self._padding = -ring.lanes % 4 if ring.lanes > 4 else 0

    @torch.inference_mode()
    def prefill(self, lane: int, ids: Sequence[int], progress: Progress | None = None) -> Tensor:
        """Read a prompt into a lane that was reset, one layer at a time; returns the last token's logits [1, V].

        A layer's keys and values for the whole prompt exist only while that layer runs, so a prompt may be longer than
        the ring.
        """
        model, ring, n = self.model, self.ring, len(ids)
        angles = model.angles(torch.arange(n, device=model.device), n)

        def attention(layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = model.split(layer, qkv, angles[layer.index])
            out = causal_attention(q, k, v)
            kept = ring.retention.keep(layer.index, n, lambda: last_attention(q[-1], k))
            ring.admit(layer.index, lane, q, k, v, kept)
            if progress is not None:
                progress(layer.index + 1, model.config.layers)
            return out

        hidden = model.forward(torch.tensor(ids, device=model.device), attention)
        ring.start(lane, n)
        return model.logits(hidden[-1:])

    @torch.inference_mode()
    def first_token(self, lane: int, logits: Tensor) -> int:
        """Draw a prefilled lane's first token from its logits [1, V]."""
        token = self.sampler.draw(logits, self.ring, [lane])
        self.ring.next_token[lane] = token[0]
        return int(token)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """One token for every running lane: ids [B], -1 for a row that was not finite or does not run."""
        logits = self.forward(self.ring.next_token)
        token = torch.where(self.ring.active, self.sampler.draw(logits, self.ring), -1)
        self.ring.next_token.copy_(token)
        return token.tolist()

    @torch.inference_mode()
    def forward(self, token: Tensor) -> Tensor:
        """Append ``token`` [B] to the running lanes and advance them; returns the logits that follow [B, V]."""
        model, ring = self.model, self.ring
        ring.begin_step()
        angles = model.angles(ring.seen, ring.seen + 1)

        def attention(layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = model.split(layer, qkv[: ring.lanes], angles[layer.index])
            out = ring.attend(layer.index, q, k, v).flatten(1)
            return F.pad(out, (0, 0, 0, self._padding)) if self._padding else out

        ids = token.clamp(min=0)
        hidden = model.forward(F.pad(ids, (0, self._padding)) if self._padding else ids, attention)
        ring.end_step()
        return model.logits(hidden)[: ring.lanes]
