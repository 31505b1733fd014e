"""The page of a trace in headless Chromium: it shows the trace, obeys keys and mouse, and logs nothing.

Deselected unless asked for: pytest -m browser. Without Chromium it fails.
"""

from __future__ import annotations

import numpy as np
import pytest

from browser import Browser
from ringkv.apps.trace.page import render
from ringkv.engine.record import DROPPED
from traces import hostile, made

pytestmark = pytest.mark.browser
DETAILS = """Object.fromEntries([...document.querySelectorAll("#details dt")].map(
    (name) => [name.textContent, name.nextElementSibling.textContent]))"""
SPANS = "[...document.querySelectorAll('.text > span')]"
CELLS = "[...document.querySelectorAll('#map rect')]"
STATE = "document.body.dataset.state"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """A browser that must not have logged anything when the test is done."""
    yield chromium
    assert chromium.logged == []


@pytest.fixture(scope="module")
def trace():
    return made(3, 2, 12, 60)


@pytest.mark.parametrize("t, token", [(12, 3), (21, 0), (30, 25), (44, 17), (60, 40)])
def test_it_shows_what_the_trace_says(browser, trace, t, token):
    browser.open(render(trace), f"#t={t}&token={token}")
    assert browser.run(STATE) == f"t={t}&token={token}"
    assert browser.run("document.getElementById('now').textContent") == f"{t} of 60"
    live, shown = trace.live(t), browser.run(DETAILS)
    held = f"{int(live[..., token].sum())} of 6 pairs"
    assert shown["held by"] == ("not read yet" if token >= t else held)
    assert shown["position"] == f"{token}, {'prompt' if token < 12 else 'answer'}"
    evicted = (trace.taken[..., token] > 0) & (trace.taken[..., token] < DROPPED)
    assert ("evicted" in shown) == evicted.any()
    if evicted.any():
        at = sorted({int(n) for n in trace.left_at()[..., token][evicted]})
        times = f"{at[0]} to {at[-1]}" if len(at) > 1 else str(at[0])
        pairs = f"{evicted.sum()} pair{'s' * bool(evicted.sum() > 1)}"
        assert shown["evicted"] == f"{pairs}, after {times} tokens"
    assert shown["at the end"] == f"live in {int(trace.live()[..., token].sum())} of 6"
    ranges = trace.v_range[..., token].astype(float)
    assert shown["value range"] == f"{ranges.mean():.2f} ({ranges.min():.2f} to {ranges.max():.2f})"
    reached = live.any((0, 1))
    wanted = ["later" if p >= t else "here" if reached[p] else "gone" for p in range(60)]
    states = browser.run(SPANS + ".map((span) => span.className)")
    assert [set(state.split()) - {"chosen"} for state in states] == [{state} for state in [*wanted, "unread"]]
    shades = browser.run(SPANS + ".map((span) => Number(span.style.getPropertyValue('--s')))")
    assert shades == pytest.approx([*live.mean((0, 1)), 0], abs=0.0101)
    dropped = trace.taken[..., token] == DROPPED
    kinds = np.where(live[..., token], "held", np.where(dropped, "dropped", "out")).ravel().tolist()
    assert browser.run(CELLS + ".map((cell) => cell.getAttribute('class'))") == kinds


def test_without_a_token_it_shows_the_prompt(browser, trace):
    browser.open(render(trace))
    assert browser.run(STATE) == "t=60&token="
    assert browser.run(DETAILS)["held somewhere"] == f"{int(trace.live().any((0, 1)).sum())} of 60 tokens"
    shares = trace.live()[..., :12].mean(-1).ravel()
    opacity = browser.run(CELLS + ".map((cell) => Number(cell.getAttribute('opacity')))")
    assert opacity == pytest.approx(0.08 + 0.92 * shares, abs=1e-3)


def test_keys(browser, trace):
    browser.open(render(trace), "#t=40")
    browser.run("document.getElementById('time').focus()")
    browser.press("ArrowLeft", "ArrowLeft")
    assert browser.run(STATE) == "t=38&token="
    browser.press("Home")
    assert browser.run(STATE) == "t=12&token="
    browser.press("End")
    browser.run("document.getElementById('text').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert browser.run(STATE) == "t=60&token=1"
    assert browser.run(DETAILS)["position"] == "1, prompt"
    browser.press("End")
    assert browser.run(DETAILS)["in the ring"].startswith("never")
    browser.press("Escape")
    assert browser.run(STATE) == "t=60&token="


def test_buttons(browser, trace):
    browser.open(render(trace), "#t=22")
    times = sorted({int(n) for n in trace.evicted_at.ravel() if n})
    browser.run("document.getElementById('next').focus()")
    browser.press("Enter")
    after = min(n for n in times if n > 22)
    assert browser.run(STATE) == f"t={after}&token="
    browser.point("document.getElementById('prev')", click=True)
    assert browser.run(STATE) == f"t={max(n for n in times if n < after)}&token="
    browser.run("document.getElementById('play').focus()")
    browser.press("Enter")
    assert browser.run("document.getElementById('play').textContent") == "Pause"
    moved = f"{STATE} > 't=30' ? done(true) : setTimeout(wait, 20)"
    assert browser.run(f"new Promise((done) => {{ const wait = () => ({moved}); wait(); }})")
    browser.press("Enter")
    assert browser.run("document.getElementById('play').getAttribute('aria-pressed')") == "false"


def test_mouse(browser, trace):
    browser.open(render(trace))
    browser.point(f"{SPANS}[25]")
    tip = browser.run("document.getElementById('tip').textContent").splitlines()
    assert tip[:2] == [f'token: " w25" ({trace.token_ids[25]})', "position: 25, answer"]
    assert browser.run(DETAILS)["position"] == "25, answer"
    browser.point(f"{SPANS}[25]", click=True)
    assert browser.run(STATE) == "t=60&token=25"
    layer, head = (int(n) for n in np.argwhere((trace.taken[..., 25] > 0) & (trace.taken[..., 25] < DROPPED))[0])
    browser.point(f"{CELLS}[{2 * layer + head}]")
    number = int(trace.taken[layer, head, 25])
    assert browser.run("document.getElementById('cell').textContent") == (
        f"Layer {layer}, head {head}: evicted by its eviction {number}, after {trace.evicted_at[layer, number - 1]} "
        f"tokens; value range {float(trace.v_range[layer, head, 25]):.3f}."
    )
    browser.point("document.querySelector('h1')")
    assert browser.run("document.getElementById('tip').hidden")
    browser.point("document.getElementById('strip')", click=True)
    assert browser.run(STATE) == "t=60&token=30"


def test_hostile_texts_do_nothing(browser):
    browser.open(render(hostile()), "#t=50&token=20")
    assert browser.run("document.title").startswith("What the ring remembered: </script>")
    assert browser.run("document.querySelectorAll('img, b, script').length") == 2
    assert browser.run(DETAILS)["held by"].endswith("of 6 pairs")


def test_its_policy_stops_a_script_that_is_not_its_own(chromium):
    """What is hostile and came through all the same would not run."""
    source = render(hostile()).replace("</h1>", "</h1><script>document.title = 'had'</script>")
    chromium.open(source)
    assert chromium.run("document.title").startswith("What the ring remembered")
    assert "Content Security Policy" in str(chromium.logged)


def test_a_nonsense_address_is_no_address(browser, trace):
    browser.open(render(trace), "#t=x&token=999")
    assert browser.run(STATE) == "t=60&token="


def test_a_large_page_opens(browser):
    browser.open(render(made(40, 8, 100, 6_000)), "#t=5000&token=4000")
    assert browser.run(DETAILS)["held by"].endswith("of 320 pairs")
