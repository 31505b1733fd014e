"""A trace as one self-contained page: plain HTML with its style, script and data in it, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from ringkv.apps.trace.trace import Trace, spread

TEXT_BYTES = 4 << 20  # of the tokens' markup
PAIR_BYTES = 9 << 20  # of what is known a (layer, head, token), before base64 adds a third
_MARKUP_BYTES = 40  # around a token, more than there is
_NOWHERE = "base-uri 'none'; form-action 'none'"
_LONGEST = 300  # characters shown of a token, or of a name
_CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}


def render(trace: Trace) -> str:
    """The page, at most 20 MB; where it holds less than the trace, it says so."""
    first, prompt = _first_shown(trace), trace.prompt_tokens
    layers = list(range(0, len(trace.taken), _layer_step(trace, first)))
    assets = files("ringkv.apps.trace").joinpath("assets")
    css, script = (assets.joinpath(f"trace.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(brief=_brief, grouped="{:,}".format, spread=spread)
    template = environment.from_string(assets.joinpath("trace.html").read_text(encoding="utf-8"))
    tokens = _tokens(trace, first)
    return template.render(
        trace=trace,
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(css)}; {_NOWHERE}",
        css=css,
        script=script,
        layers=layers,
        first=first,
        parts={"Prompt": tokens[: max(0, prompt - first)], "Answer": tokens[max(0, prompt - first) :]},
        # A layer: how many of the prompt retention let in, and how many were left after the eviction at prefill.
        entered=list(zip(trace.retained, trace.live(prompt)[:, 0].sum(-1).tolist(), strict=True)),
        data=page_data(trace, first, layers),
    )


def page_data(trace: Trace, first: int, layers: list[int]) -> dict[str, Any]:
    """What the script reads: arrays in base64, little-endian, of some layers and of the tokens from ``first`` on."""

    def packed(array: np.ndarray) -> str:
        return base64.b64encode(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).decode()

    return {
        "layers": layers,
        "heads": trace.taken.shape[1],
        "first": first,
        "prompt": trace.prompt_tokens,
        "seen": trace.seen,
        "taken": packed(trace.taken[layers][..., first:]),
        "ranges": packed(trace.v_range[layers][..., first:]),
        "evicted_at": packed(trace.evicted_at[layers]),
        "ids": packed(trace.token_ids[first:]),
    }


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "\u2026"


def _first_shown(trace: Trace) -> int:
    """The first token whose markup, with all after it, fits."""
    sizes = np.array([len(html.escape(_brief(text)).encode()) for text in trace.texts]) + _MARKUP_BYTES
    for id, name in trace.special.items():
        sizes[trace.token_ids == int(id)] += len(html.escape(_brief(name)).encode())
    fits = sizes[::-1].cumsum() <= TEXT_BYTES
    return min(len(fits) - int(fits.sum()), trace.seen - 1)


def _layer_step(trace: Trace, first: int) -> int:
    """The least n such that every n-th layer fits."""
    layers, heads, seen = trace.taken.shape
    a_layer = 4 * (heads * (seen - first) + trace.evicted_at.shape[1])
    return -(-layers // max(1, PAIR_BYTES // a_layer))


def _tokens(trace: Trace, first: int) -> list[tuple[str, str, str]]:
    """(CSS classes, text, name of a special token) of every token."""
    loop = range(*(trace.loop() or (0, 0)))
    tokens = []
    for position in range(first, len(trace.texts)):
        text = _brief(trace.texts[position]).translate(_CONTROL)
        name = _brief(trace.special.get(str(trace.token_ids[position]), ""))
        kinds = {"special": name, "part": not text and not name, "break": "\n" in text, "loop": position in loop}
        tokens.append((" ".join(kind for kind, holds in kinds.items() if holds), text, name))
    return tokens
