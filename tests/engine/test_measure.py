"""``ringkv bench``: what it reports, not how fast this machine is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringkv.cli import app

CASES = [("--budgets", "many"), ("--lanes", "1,0"), ("--policies", "x"), ("--tokens", 0)]


def bench(*arguments):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_a_row_for_each_combination_and_json_last(tiny_checkpoint):
    options = ("--budgets", "40,60", "--lanes", "1,3", "--policies", "h2o,streaming", "--window", 8)
    code, out, err = bench(tiny_checkpoint("qwen3"), *options, "--tokens", 20, "--prompt", 41, "--dtype", "float32")
    assert (code, err) == (0, "")
    told = json.loads(out.splitlines()[-1])
    rows = told["rows"]
    wanted = {(b, n, p) for b in (40, 60) for n in (1, 3) for p in ("h2o", "streaming")}
    assert {(row["budget"], row["lanes"], row["policy"]) for row in rows} == wanted
    assert len(rows) == 8
    by = {(row["budget"], row["lanes"], row["policy"]): row for row in rows}
    assert by[40, 1, "h2o"]["evictions"] > 0 == by[60, 1, "h2o"]["evictions"]
    slot = 2 * 2 * 16 * 2 * 4  # layers, KV heads, head dim, K and V, float32
    assert by[60, 1, "h2o"]["step_bytes"] - by[40, 1, "h2o"]["step_bytes"] == (61 - 48) * slot
    for row in rows:
        assert row["floor_ms"] == pytest.approx(row["step_bytes"] / row["bandwidth_gb_s"] / 1e6)
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["late_ms"])
        assert row["tok_s"] > 0
        assert row["peak_bytes"] > row["held_bytes"]


@pytest.mark.parametrize("option, value", CASES)
def test_what_is_not_accepted_is_one_line_and_code_2(tiny_checkpoint, option, value):
    code, out, err = bench(tiny_checkpoint("llama"), option, value)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
