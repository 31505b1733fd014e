"""``ringkv trace`` at a terminal: a trace in a few lines, or written as a page or a picture."""

from __future__ import annotations

from pathlib import Path

from ringkv.apps.console import fields_table, show
from ringkv.apps.options import check_output
from ringkv.apps.trace.page import render
from ringkv.apps.trace.plot import draw
from ringkv.apps.trace.trace import Trace, spread
from ringkv.files import write_whole


def show_trace(file: Path, html: Path | None, png: Path | None) -> None:
    """Draw the trace in a file: as a page, as a picture, or in a few lines where neither is asked for.

    Raises:
        RingkvError: no trace is there, or what is asked for cannot be written.
    """
    for name, path, others in (("--html", html, (file, png)), ("--png", png, (file,))):
        if path is not None:
            check_output(name, path, *others)
    trace = Trace.load(file)
    if html is not None:
        write_whole(html, render(trace).encode(errors="replace"), "--html")
    if png is not None:
        draw(trace, png)
    if html is None and png is None:
        print_trace(trace)


def print_trace(trace: Trace) -> None:
    """A trace in a few lines."""
    layers, heads, seen = trace.taken.shape
    live, prompt, loop = trace.live(), trace.prompt_tokens, trace.loop()
    answer = f"{live[..., prompt:].mean():.1%}" if seen > prompt else "nothing"
    rows = {
        "model": trace.model,
        "policy": f"{trace.policy}; budget {trace.budget} + window {trace.window}, seed {trace.seed}",
        "text": f"{prompt} prompt tokens, {len(trace.texts) - prompt} new; {seen} read; ended: {trace.finish_reason}",
        "pairs": f"{layers} layers of {heads} KV heads",
        "evictions": f"{spread(trace.evictions)} a layer",
        "retention": f"{trace.retention}; {spread(trace.retained)} of {prompt} prompt tokens a layer",
        "held at the end": f"{live[..., :prompt].mean():.1%} of the prompt, {answer} of the answer",
        "tokens": f"{int(live.all((0, 1)).sum())} held by every pair, {seen - int(live.any((0, 1)).sum())} by none",
        "loop": "none" if loop is None else f"positions {loop[0]} to {loop[1] - 1}",
    }
    show(fields_table(rows))
