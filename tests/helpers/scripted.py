"""Engines whose model says what a script says: tiny, with a byte-level tokenizer that knows thoughts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ringkv import Engine, RingConfig
from ringkv.models.tokenizer import Tokenizer
from tiny import tiny_config, tiny_decoder, tiny_weights

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENING = TEMPLATE.replace(
    "{% if enable_thinking", "{% if enable_thinking is undefined %}<think>\n{% endif %}{% if enable_thinking"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def byte_tokenizer(
    template: str | None = TEMPLATE, *, special_tags: bool = False, words: Sequence[str] = ()
) -> Tokenizer:
    """One token a byte, ``words`` besides, then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    for token in CONTROL:
        backend.add_tokens([AddedToken(token, special=special_tags or "im_" in token, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template=template)


class Script:
    """An engine that draws given ids: ``script(request's prompt ids) -> the tokens that follow``.

    Args:
        latency: steps that are launched before one is read.
    """

    def __init__(
        self,
        script: Callable[[list[int]], Sequence[int]],
        tokenizer: Tokenizer | None = None,
        *,
        lanes: int = 1,
        latency: int = 0,
        ring: RingConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer or byte_tokenizer()
        config = tiny_config(vocab_size=self.tokenizer.size + 5, layers=1)
        decoder = tiny_decoder(config, tiny_weights(config, torch.float32))
        self.engine = Engine(decoder, self.tokenizer, ring=ring or RingConfig(40, 8, "streaming", "all"), lanes=lanes)
        runner: Any = self.engine._runner
        runner.latency = latency
        prefill, forward = runner.prefill, runner._forward
        said: dict[int, tuple[int, Sequence[int]]] = {}  # lane -> tokens of its prompt, and what follows
        self.said, self.script = said, script

        def logits(token: int) -> torch.Tensor:
            row = torch.zeros(1, config.vocab_size)
            row[0, token] = 50.0
            return row

        def scripted_prefill(lane, ids, progress=None):
            prefill(lane, ids, progress)
            said[lane] = len(ids), script(list(ids))
            return logits(said[lane][1][0])

        def scripted_forward(token):
            running = list(self.engine.ring.running)
            forward(token)
            rows = torch.zeros(lanes, config.vocab_size)
            for lane in running:
                start, tokens = said[lane]
                rows[lane] = logits(tokens[min(int(self.engine.ring.seen[lane]) - start, len(tokens) - 1)])
            return rows

        runner.prefill, runner._forward = scripted_prefill, scripted_forward

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)
