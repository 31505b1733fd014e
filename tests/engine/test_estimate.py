"""``ringkv plan`` as a person or a script uses it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringkv import Engine, RingConfig
from ringkv.cli import app


def plan(*arguments):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_figures_are_those_of_the_engine_that_is_then_built(tiny_checkpoint):
    folder = tiny_checkpoint("qwen3")
    options = ("--budget", 100, "--window", 8, "--lanes", 3, "--prompt", 50)
    code, out, _ = plan(folder, *options, "--memory", "1GiB", "--json")
    figures = json.loads(out)
    assert code == 0
    with Engine.from_pretrained(folder, ring=RingConfig(100, 8), lanes=3) as engine:
        assert {name: figures[name] for name in engine.plan()} == engine.plan()
        token = 2 * engine.ring.k[0, 0, :, 0].nbytes * engine.ring.layers
    assert figures["full_cache_bytes"] == {str(n): 3 * n * token for n in (4096, 32768, 131072)}
    assert figures["fits"]
    assert figures["memory_bytes"] == 1 << 30
    lanes, budget = figures["most_lanes"], figures["most_budget"]
    assert lanes > 3
    assert budget > 100
    for changed, fits in ((("--lanes", lanes), True), (("--lanes", lanes + 1), False)):
        told = json.loads(plan(folder, *options, *changed, "--memory", "1GiB", "--json")[1])
        assert told["fits"] is fits
    for changed, fits in ((("--budget", budget), True), (("--budget", budget + 1), False)):
        told = json.loads(plan(folder, *options, *changed, "--memory", "1GiB", "--json")[1])
        assert told["fits"] is fits


def test_the_table_shows_the_sum(tiny_checkpoint):
    code, out, err = plan(tiny_checkpoint("llama"), "--budget", 100, "--window", 8, "--policy", "h2o")
    assert (code, err) == (0, "")
    for word in ("weights", "[2, 1, 2, 108, 12]", "state.", "scratch", "prefill", "131072 tokens", "lanes that fit"):
        assert word in out


def test_auto_fits_the_memory_given(tiny_checkpoint):
    folder = tiny_checkpoint("llama")
    told = json.loads(plan(folder, "--budget", "auto", "--lanes", "auto", "--memory", "300MiB", "--json")[1])
    assert told["fits"]
    assert told["budget"] == 16384
    assert 1 <= told["lanes"] <= 16


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--budget", "many", "budget = 'many': accepted is an int >= 1 or 'auto'"),
        ("--lanes", "0", "lanes = 0: accepted is an int >= 1 or 'auto'"),
        ("--lanes", "few", "lanes = 'few': accepted is an int >= 1 or 'auto'"),
        ("--memory", "much", "memory = 'much': accepted is a size"),
        ("--prompt", "0", "prompt = 0: accepted is an int >= 1"),
        ("--dtype", "int8", "dtype = 'int8'"),
    ],
)
def test_what_is_not_accepted_is_one_line_and_code_2(tiny_checkpoint, option, value, message):
    code, out, err = plan(tiny_checkpoint("llama"), option, value)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
