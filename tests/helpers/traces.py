"""Traces made by hand, and what a page of one holds."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np

from ringkv.apps.trace.trace import Trace
from ringkv.engine.record import DROPPED, LIVE, PREFILL

HOSTILE = [
    "</script><script>document.title='had'</script>",
    "<img src=x onerror=\"document.title='had'\">",
    "\"'><b>",
    "&lt;i&gt;",
    "<!--<script>",
    "{{ 7 * 7 }}",
    "\u2028\u202ereversed",
    "]]>",
    "\x00\x1b\r\n\x7f",
    "\N{GRINNING FACE}",
]


def made(layers: int, heads: int, prompt: int, seen: int, window: int = 8, seed: int = 0, **changes: Any) -> Trace:
    """A trace whose records agree, and are otherwise drawn at random; one token more than was read."""
    random = np.random.default_rng(seed)
    evictions = max(0, (seen - prompt - 1) // window)
    evicted_at = np.zeros((layers, evictions), np.int32)
    for layer in range(layers):  # one fewer in odd layers
        own = max(0, evictions - layer % 2)
        evicted_at[layer, :own] = prompt + 1 + window * np.arange(own)
    taken = np.full((layers, heads, seen), LIVE, np.uint16)
    for layer in range(layers):
        own = max(0, evictions - layer % 2)
        earliest = np.searchsorted(evicted_at[layer, :own], np.arange(seen), side="right") + 1
        number = earliest + random.integers(0, 5, (heads, seen))
        taken[layer] = np.where((number <= own) & (random.random((heads, seen)) < 0.8), number, LIVE)
        taken[layer, :, :prompt][:, random.random(prompt) < 0.2] = DROPPED
        taken[layer, 0, 1:prompt:5] = PREFILL
    fields: dict[str, Any] = {
        "token_ids": random.integers(0, 50, seen + 1).astype(np.int32),
        "taken": taken,
        "v_range": random.random((layers, heads, seen)).astype(np.float16),
        "evicted_at": evicted_at,
        "texts": [f" w{i}" for i in range(seen + 1)],
        "special": {},
        "model": "made",
        "prompt_tokens": prompt,
        "policy": "random",
        "budget": 64,
        "window": window,
        "sinks": 4,
        "pin": 0,
        "retention": "refreekv:threshold=0.01",
        "seed": 3,
        "sample": 0,
        "finish_reason": "length",
        "repetition": None,
    }
    return Trace(**{**fields, **changes})


def hostile() -> Trace:
    """A trace whose every text tries to leave its place in a page."""
    trace = made(3, 2, 12, 60)
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(61)]
    texts[20] = ""
    names: dict[str, Any] = dict.fromkeys(("model", "policy", "retention", "finish_reason"), HOSTILE[0])
    return made(3, 2, 12, 60, texts=texts, special={str(trace.token_ids[20]): HOSTILE[1]}, **names)


class Page(HTMLParser):
    """The parts of a page that tests ask about.

    Attributes:
        spans: (classes, text, name) of every token.
        attributes: every attribute of every element, by element. scripts: what the script elements hold, by type.
        styles: what the style elements hold. text: what a reader sees, in order.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.spans: list[tuple[set[str], str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.styles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self._texts = 0
        self._kind = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.attributes.append((tag, given))
        if tag in ("meta", "input", "rect"):
            return
        self._open.append(tag)
        if tag == "div" and given.get("class") == "text":
            self._texts = len(self._open)
        elif tag == "span" and self._texts:
            self.spans.append((set((given.get("class") or "").split()), "", given.get("data-name") or ""))
        elif tag == "script":
            self._kind = given.get("type") or "js"
            assert self._kind not in self.scripts
            self.scripts[self._kind] = ""

    def handle_endtag(self, tag: str) -> None:
        if self._texts == len(self._open):
            self._texts = 0
        if tag in ("meta", "input", "rect"):
            return
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[self._kind] += data
        elif self._open and self._open[-1] == "style":
            self.styles.append(data)
        else:
            self.text += data
            if self._texts and self._open[-1] == "span":
                classes, text, name = self.spans[-1]
                self.spans[-1] = classes, text + data, name

    def data(self) -> dict[str, Any]:
        """What the script reads, its arrays unpacked."""
        data = json.loads(self.scripts["application/json"])
        for name, kind in (("taken", "<u2"), ("ranges", "<f2"), ("evicted_at", "<i4"), ("ids", "<i4")):
            data[name] = np.frombuffer(base64.b64decode(data[name]), kind)
        return data
