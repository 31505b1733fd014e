"""The survival map of a trace, drawn with matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from ringkv.apps.trace.trace import Trace, spread
from ringkv.errors import RingkvError
from ringkv.files import write_whole

COLUMNS, ROWS = 1200, 800  # at most; longer texts are averaged
_PAPER, _INK, _FAINT, _HEAT, _LOOP = "#fbfaf7", "#1d2227", "#6a7077", "#0e8086", "#c2410c"

_STYLE = {
    **{"figure.facecolor": _PAPER, "savefig.facecolor": _PAPER, "axes.facecolor": _PAPER, "axes.edgecolor": _FAINT},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.labelcolor": _INK, "text.parse_math": False},
    **{"axes.titlelocation": "left", "axes.titlecolor": _INK, "axes.titlesize": 11, "axes.titlepad": 11},
    **{"xtick.color": _FAINT, "ytick.color": _FAINT, "xtick.labelsize": 8, "ytick.labelsize": 8},
    **{"image.aspect": "auto", "image.interpolation": "nearest"},
}


def survival(trace: Trace, columns: int = COLUMNS, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """The share of all (layer, head) pairs that hold the tokens at each position, over time.

    Returns:
        float32 [r, c]: row i is after times[i] tokens; NaN where no token of the column was read yet. Columns are equal
        shares of the T positions, at most ``columns``.
        int64 [r]: times, from the end of the prompt to the end, at most ``rows``.
    """
    seen = trace.seen
    columns = min(columns, seen)
    times = np.unique(np.linspace(trace.prompt_tokens, seen, rows).round().astype(np.int64))
    column = np.arange(seen) * columns // seen
    pairs = trace.taken.shape[0] * trace.taken.shape[1]
    size = (len(times) + 1) * columns

    def counted(time: np.ndarray) -> np.ndarray:
        """Of positions with a time each, how many in each column have it behind them, by row [r, c]."""
        row = np.searchsorted(times, time)
        each = np.bincount((row * columns + np.broadcast_to(column, row.shape)).ravel(), minlength=size)
        return each.reshape(-1, columns)[:-1].cumsum(0)

    read = counted(np.arange(1, seen + 1)) * pairs
    left = counted(trace.left_at())
    share = np.full(read.shape, np.nan, np.float32)
    np.divide(read - left, read, out=share, where=read > 0, casting="unsafe")
    return share, times


def draw(trace: Trace, path: str | Path) -> None:
    """Draw the survival map over time and, below it, what every layer holds at the end, as a PNG.

    Raises:
        RingkvError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise RingkvError("--png: matplotlib is not installed; pip install 'ringkv[plot]'") from None
    shades = LinearSegmentedColormap.from_list("held", ["#f1efe9", "#8ec5c6", _HEAT, "#06474b"])
    share, _ = survival(trace)
    layers, seen, prompt = len(trace.taken), trace.seen, trace.prompt_tokens
    picture = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6.4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        over_time, by_layer = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        look: dict[str, Any] = {"cmap": shades.with_extremes(bad=_PAPER), "vmin": 0, "vmax": 1}
        image = over_time.imshow(share, extent=(0, seen, seen + 0.5, prompt - 0.5), **look)
        by_layer.imshow(_by_layer(trace), extent=(0, seen, layers - 0.5, -0.5), **look)
        what = f"{trace.model[-40:]}, {trace.policy_name}, budget {trace.budget}, window {trace.window}"
        over_time.set_title(f"What the ring remembered: {what}")
        over_time.set_ylabel("tokens read")
        by_layer.set_ylabel("layer, at the end")
        by_layer.set_xlabel("position of the token")
        _label(over_time, trace)
        by_layer.set_xlim(0, seen)
        for axes in (over_time, by_layer):
            axes.axvline(prompt, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        bar = figure.colorbar(image, ax=[over_time, by_layer], fraction=0.035, pad=0.015)
        bar.set_label("share of (layer, head) pairs that hold it")
        bar.outline.set_visible(False)
        figure.savefig(picture, format="png")
    write_whole(Path(path), picture.getvalue(), "--png")


def _label(axes: Any, trace: Trace) -> None:
    """Say what is where, in the half that is empty: above the diagonal nothing was read yet."""
    seen, prompt = trace.seen, trace.prompt_tokens
    lines = [
        f"{prompt} prompt tokens, left of the dashed line",
        f"{trace.retention.split(':')[0]} let in {spread(trace.retained)} of them a layer",
        f"{spread(trace.evictions)} evictions a layer, {trace.window} tokens each",
    ]
    if (loop := trace.loop()) is not None:
        lines.append(f"a loop, {loop[0]} to {loop[1] - 1}, under the orange bar")
        axes.axvspan(loop[0], min(loop[1], seen), 1, 1.015, color=_LOOP, linewidth=0, clip_on=False)
    axes.text(0.985, 0.95, "\n".join(lines), fontsize=9, color=_FAINT, transform=axes.transAxes, ha="right", va="top")


def _by_layer(trace: Trace) -> np.ndarray:
    """The share of each layer's heads that hold the tokens of each column at the end: [L, c]."""
    held = trace.live().mean(1)
    columns = min(COLUMNS, trace.seen)
    starts = -(-np.arange(columns) * trace.seen // columns)
    sizes = np.diff(np.append(starts, trace.seen))
    return np.add.reduceat(held, starts, axis=1) / sizes
