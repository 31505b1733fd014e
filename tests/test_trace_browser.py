"""The page of a trace in headless Chromium: its script runs, follows its address, and logs nothing.

Deselected unless asked for: pytest -m browser. Without Chromium it fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest

from ringkv.engine.record import DROPPED
from ringkv.trace_page import render
from traces import hostile, made

pytestmark = pytest.mark.browser
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-dev-shm-usage"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"]


@pytest.fixture
def opened(tmp_path):
    """A function (source, address) -> the page's DOM after its script ran, which must have logged nothing."""

    def open_page(source, address=""):
        names = ("chromium", "chromium-browser", "google-chrome")
        browser = next(filter(None, map(shutil.which, names)), None)
        assert browser, f"none of {', '.join(names)} is installed"
        (tmp_path / "page.html").write_text(source, encoding="utf-8")
        url = f"{(tmp_path / 'page.html').as_uri()}{address}"
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [browser, *FLAGS, profile, "--virtual-time-budget=5000", "--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert ":CONSOLE" not in done.stderr, done.stderr
        assert 'data-ready="yes"' in done.stdout
        return done.stdout

    return open_page


def details(dom):
    rows = re.search(r'<dl id="details".*?>(.*?)</dl>', dom, re.S)[1]
    return {unescape(k): unescape(v) for k, v in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", rows, re.S)}


def classes(dom, element):
    """The classes of the page's spans or of the cells of its map, in order."""
    return [set(found.split()) for found in re.findall(rf'<{element}[^>]* class="([^"]*)"', dom)]


@pytest.mark.parametrize("t, token", [(12, 3), (21, 0), (30, 25), (44, 17), (60, 40)])
def test_it_shows_what_the_trace_says(opened, t, token):
    trace = made(3, 2, 12, 60)
    dom = opened(render(trace), f"#t={t}&token={token}")
    assert f'data-state="t={t}&amp;token={token}"' in dom
    assert f">{t} of 60<" in dom
    live = trace.live(t)
    shown = details(dom)
    held = int(live[..., token].sum())
    assert shown["held by"] == f"{held} of 6 pairs"
    assert shown["position"] == f"{token}, {'prompt' if token < 12 else 'answer'}"
    assert shown["at the end"] == f"live in {int(trace.live()[..., token].sum())} of 6"
    ranges = trace.v_range[..., token].astype(float)
    assert shown["value range"] == f"{ranges.mean():.2f} ({ranges.min():.2f} to {ranges.max():.2f})"
    text = dom[dom.index('<main id="text"') : dom.index("<aside")]
    states = [found & {"here", "gone", "later", "unread"} for found in classes(text, "span")]
    reached = live.any((0, 1))
    wanted = ["later" if p >= t else "here" if reached[p] else "gone" for p in range(60)]
    assert states == [{state} for state in [*wanted, "unread"]]
    cells = re.search(r'<svg id="map".*?</svg>', dom, re.S)[0]
    dropped = trace.taken[..., token] == DROPPED
    kinds = np.where(live[..., token], "held", np.where(dropped, "dropped", "out")).ravel()
    assert classes(cells, "rect") == [{kind} for kind in kinds]


def test_shares_become_shades(opened):
    trace = made(3, 2, 12, 60)
    text = opened(render(trace), "#t=40")
    text = text[text.index('<main id="text"') : text.index("<aside")]
    shades = [float(shade) for shade in re.findall(r"<span[^>]*--s: ?([\d.]+)", text)]
    share = trace.live(40).mean((0, 1))
    assert shades == pytest.approx([*share, 0], abs=0.0101)


def test_without_a_token_it_shows_the_prompt(opened):
    trace = made(3, 2, 12, 60)
    dom = opened(render(trace))
    assert 'data-state="t=60&amp;token="' in dom
    assert details(dom)["held somewhere"] == f"{int(trace.live().any((0, 1)).sum())} of 60 tokens"
    cells = re.search(r'<svg id="map".*?</svg>', dom, re.S)[0]
    shares = trace.live()[..., :12].mean(-1).ravel()
    assert [float(o) for o in re.findall(r'opacity="([\d.]+)"', cells)] == pytest.approx(0.08 + 0.92 * shares, abs=1e-3)


def test_hostile_texts_do_nothing(opened):
    dom = opened(render(hostile()), "#t=50&token=20")
    assert "<title>What the ring remembered" in dom
    assert "<img" not in dom.replace("&lt;img", "")
    assert details(dom)["held by"].endswith("of 6 pairs")


def test_the_last_token_and_a_nonsense_address(opened):
    page = render(made(3, 2, 12, 60))
    assert details(opened(page, "#t=60&token=60"))["in the ring"].startswith("never")
    assert 'data-state="t=60&amp;token="' in opened(page, "#t=x&token=999")


def test_a_large_page_opens(opened):
    trace = made(40, 8, 100, 6_000)
    dom = opened(render(trace), "#t=5000&token=4000")
    assert details(dom)["held by"].endswith("of 320 pairs")
