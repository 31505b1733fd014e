"""The survival map: its numbers against a count by hand, its picture not empty."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from ringkv.apps.trace.plot import _by_layer, draw, survival
from ringkv.errors import RingkvError
from traces import made


@pytest.mark.parametrize("columns, rows", [(1200, 800), (7, 5), (60, 3), (13, 49)])
def test_survival_is_what_a_count_says(columns, rows):
    trace = made(3, 2, 12, 60)
    share, times = survival(trace, columns, rows)
    live = {t: trace.live(t).sum((0, 1)) for t in range(12, 61)}
    assert times[0] == 12
    assert times[-1] == 60
    assert share.shape == (len(times), min(columns, 60)) == (min(rows, 49), min(columns, 60))
    column = [position * share.shape[1] // 60 for position in range(60)]
    for row, t in enumerate(times):
        for c in range(share.shape[1]):
            inside = [p for p in range(60) if column[p] == c and p < t]
            if inside:
                assert share[row, c] == pytest.approx(sum(live[t][p] for p in inside) / (6 * len(inside)), abs=1e-6)
            else:
                assert np.isnan(share[row, c])


def test_layers_at_the_end():
    trace = made(3, 2, 12, 60)
    assert np.array_equal(_by_layer(trace), trace.live().mean(1))
    long = made(2, 2, 100, 3000)
    columns = np.arange(3000) * 1200 // 3000
    held = long.live().mean(1)
    assert _by_layer(long) == pytest.approx(np.stack([held[:, columns == c].mean(1) for c in range(1200)], axis=1))


@pytest.mark.parametrize(
    "trace",
    [
        made(3, 2, 12, 60),
        made(1, 1, 1, 1, taken=np.full((1, 1, 1), 65535, np.uint16), evicted_at=np.zeros((1, 0), np.int32)),
        made(
            2,
            1,
            40,
            3000,
            model="<$\\nope{$ & co>",
            retention="$\\nope{$",
            repetition={"unit": [7], "period": 1, "count": 1},
        ),
    ],
    ids=["small", "least", "long"],
)
def test_the_picture_is_written(trace, tmp_path):
    path = tmp_path / "map.png"
    draw(trace, path)
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    if trace.seen > 1:
        assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    assert path.stat().st_size < 1_000_000


def test_a_loop_is_marked(tmp_path):
    """In orange, above its positions and nowhere else."""
    token_ids = np.arange(61, dtype=np.int32)
    token_ids[30:45] = [1, 2, 3] * 5
    repetition = {"unit": [1, 2, 3], "period": 3, "count": 5}
    draw(made(3, 2, 12, 60, token_ids=token_ids, repetition=repetition), tmp_path / "loop.png")
    draw(made(3, 2, 12, 60), tmp_path / "none.png")
    orange = np.array([0xC2, 0x41, 0x0C]) / 255

    def marked(name):
        image = matplotlib.image.imread(tmp_path / name)[..., :3]
        return np.flatnonzero((np.abs(image - orange) < 0.01).all(-1).any(0))

    bar = marked("loop.png")
    assert len(marked("none.png")) == 0
    width = matplotlib.image.imread(tmp_path / "loop.png").shape[1]
    assert 0.2 * width < bar[-1] - bar[0] < 0.22 * width
    assert len(bar) == bar[-1] - bar[0] + 1


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(RingkvError, match=r"^--png = '.*map.png': there is no folder '.*/no'$"):
        draw(made(1, 1, 4, 9), tmp_path / "no" / "map.png")
