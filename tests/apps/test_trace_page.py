"""The page of a trace, parsed: it shows the trace, whatever its texts are, and fits in 20 MB."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ringkv.apps.trace.page import render
from traces import HOSTILE, Page, hostile, made

LIMIT = 20_000_000


def test_the_page_holds_the_trace():
    trace = made(3, 2, 12, 60)
    page = Page(render(trace))
    data = page.data()
    shape = (3, 2, 60)
    assert [text for _, text, _ in page.spans] == trace.texts
    assert np.array_equal(data["taken"].reshape(shape), trace.taken)
    assert np.array_equal(data["ranges"].reshape(shape), trace.v_range)
    assert np.array_equal(data["evicted_at"].reshape(3, -1), trace.evicted_at)
    assert np.array_equal(data["ids"], trace.token_ids)
    assert (data["layers"], data["heads"], data["first"], data["prompt"], data["seen"]) == ([0, 1, 2], 2, 0, 12, 60)
    slider = next(given for tag, given in page.attributes if tag == "input")
    assert (slider["min"], slider["max"], slider["value"]) == ("12", "60", "60")
    assert "6 (layer, KV head) pairs" in page.text
    assert "12 prompt, 49 new" in " ".join(page.text.split())
    assert "the first 4" in page.text
    assert "the first 9" in Page(render(made(3, 2, 12, 60, pin=9))).text
    assert not [given for tag, given in page.attributes if given.get("class") == "note"]


def test_retention_is_drawn_by_layer():
    trace = made(3, 2, 12, 60)
    page = Page(render(trace))
    bars = [given for tag, given in page.attributes if tag == "rect"]
    kept = trace.live(12)[:, 0].sum(-1)
    for layer in range(3):
        whole, let_in, left = bars[3 * layer : 3 * layer + 3]
        assert float(whole["height"]) == 60
        assert float(let_in["height"]) == pytest.approx(60 * trace.retained[layer] / 12, abs=0.01)
        assert float(left["height"]) == pytest.approx(60 * kept[layer] / 12, abs=0.01)
        assert f"layer {layer}: {trace.retained[layer]} of 12 let in, {kept[layer]} in the ring" in page.text


def test_a_loop_is_marked():
    trace = made(2, 1, 12, 60)
    trace.token_ids[40:52] = [1, 2, 3] * 4
    trace = made(2, 1, 12, 60, token_ids=trace.token_ids, repetition={"unit": [1, 2, 3], "period": 3, "count": 4})
    page = Page(render(trace))
    assert [i for i, (classes, _, _) in enumerate(page.spans) if "loop" in classes] == list(range(40, 52))
    assert "3 tokens, 4 times" in page.text


def test_nothing_comes_from_elsewhere_and_only_its_own_script_runs():
    source = render(hostile())
    page = Page(source)
    policy = next(given["content"] for tag, given in page.attributes if given.get("http-equiv"))
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (page.scripts["js"], page.styles[0])
    ]
    assert policy == (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; base-uri 'none'; form-action 'none'"
    )
    assert set(page.scripts) == {"js", "application/json"}
    assert len(page.styles) == 1
    for tag, given in page.attributes:
        assert tag in {
            *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "dl", "div", "dt", "dd"),
            *("section", "button", "label", "output", "span", "input", "svg", "main", "aside", "i", "g", "rect"),
            *("canvas", "script"),
        }
        assert not [name for name in given if name.startswith("on") or name in ("src", "href", "style", "srcset")]
    assert set(re.findall(r"https?://[^\s\"']+", source)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in source
    assert "url(" not in source


def test_hostile_texts_are_text():
    trace = hostile()
    page = Page(render(trace))
    shown = [text for _, text, _ in page.spans]
    pictures = str.maketrans({"\x00": "\u2400", "\x1b": "\u241b", "\r": "\u240d", "\x7f": "\u2421"})
    assert shown == [text.translate(pictures) for text in trace.texts]
    classes, _, name = page.spans[20]
    assert classes == {"special"}
    assert name == HOSTILE[1]
    assert page.text.count(HOSTILE[0]) >= 3 + trace.texts.count(HOSTILE[0])


def test_special_tokens_parts_of_characters_and_breaks_show():
    trace = made(1, 1, 4, 9, token_ids=np.arange(10, dtype=np.int32), special={"2": "<|end|>"})
    trace.texts[2:6] = ["", "", "\N{GRINNING FACE}", "\n\n"]
    kinds = [(classes, name) for classes, _, name in Page(render(trace)).spans]
    assert kinds[1:7] == [
        (set(), ""),
        ({"special"}, "<|end|>"),
        ({"part"}, ""),
        (set(), ""),
        ({"break"}, ""),
        (set(), ""),
    ]


@pytest.mark.parametrize(
    "sizes, note, shown",
    [
        ((40, 8, 100, 20_000), r"14 of its 40 layers are here", None),
        ((1, 1, 100, 150_000), r"only its last ([\d,]+) tokens of 150,001 are here", 1),
        ((30, 2, 50, 65_584, 1), r"10 of its 30 layers are here", None),
    ],
)
def test_a_large_trace_fits_and_says_what_is_left_out(sizes, note, shown):
    trace = made(*sizes)
    source = render(trace)
    assert 2_000_000 < len(source.encode()) <= LIMIT
    found = re.search(note, source)
    assert found
    page = Page(source)
    data = page.data()
    first, layers = data["first"], data["layers"]
    if shown:
        assert len(page.spans) == int(found[1].replace(",", "")) == 150_001 - first
    assert len(page.spans) == len(data["ids"]) == len(trace.texts) - first
    assert np.array_equal(data["taken"], trace.taken[layers][..., first:].ravel())
    assert f"{len(layers) * sizes[1]} (layer, KV head) pairs" in page.text


def test_texts_without_measure_are_cut():
    trace = made(1, 1, 4, 9)
    trace.texts[3] = "x" * 30_000_000
    page = Page(render(trace))
    assert len(page.spans[3][1]) == 300
    assert page.spans[3][1].endswith("x\u2026")


def test_a_wheel_ships_what_is_not_python(tmp_path):
    """Built in a copy, since building leaves its traces in the tree."""
    root = Path(__file__).parents[2]
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".*", "tests", "bench", "build", "*.egg-info"))
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('out'))"
    (copy / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"ringkv/apps/trace/assets/trace.{kind}" for kind in ("html", "css", "js")} < names
    assert {f"ringkv/kernels/c/{path.name}" for path in (root / "kernels" / "c").iterdir()} < names
    code = [path.relative_to(copy) for path in copy.rglob("*.py") if "build" not in path.parts]
    assert len(code) > 100
    assert {f"ringkv/{path.as_posix()}" for path in code} <= names
