"""``ringkv plan`` as a person or a script uses it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from ringkv import Engine, RingConfig, RingkvError
from ringkv.apps.plan import estimate
from ringkv.apps.plan.estimate import parse_size
from ringkv.cli import app
from ringkv.engine import loading
from ringkv.models.linear import can_pack


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
        ("--lanes", "999999999", "lanes = 999999999: accepted is an int <= 65536 or 'auto'"),
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


@pytest.fixture
def config_only(tiny_checkpoint, tmp_path, monkeypatch):
    """The hub id of a model of whose files the cache holds config.json alone."""
    repository = tmp_path / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (folder := repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    shutil.copy(tiny_checkpoint("qwen2") / "config.json", folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return "owner/model"


def test_a_hub_id_needs_its_configuration_alone(tiny_checkpoint, config_only):
    told = json.loads(plan(config_only, "--json")[1])
    assert told["model"] == config_only
    own = json.loads(plan(tiny_checkpoint("qwen2"), "--json")[1])
    different = {"model", "memory_bytes", "most_lanes", "longest_prompt", "most_budget"}
    assert {name: told[name] for name in told.keys() - different} == {
        name: own[name] for name in own.keys() - different
    }
    code, out, err = plan("owner/other")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_folder_needs_its_configuration_alone(tiny_checkpoint, tmp_path, monkeypatch):
    config = json.loads((tiny_checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path)[0] == 0
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = plan(tmp_path)
    assert (code, "safetensors" in err) == (2, True)


def test_the_plan_lists_what_ends_a_text(tiny_chat_checkpoint, tiny_checkpoint, tmp_path):
    """Oracle: the engine that is then built."""
    for folder in (tiny_chat_checkpoint, tiny_checkpoint("llama")):
        figures = json.loads(plan(folder, "--json")[1])
        with Engine.from_pretrained(folder, ring=RingConfig(100, 8)) as engine:
            assert figures["endings"] == {str(id): text for id, text in engine.prompts.endings.items()}
            known = engine.tokenizer is not None
        assert figures["endings_problem"] == (None if known else "there is no tokenizer, which may know more")
    table = plan(tiny_chat_checkpoint)[1]
    (id,) = json.loads(plan(tiny_chat_checkpoint, "--json")[1])["endings"]
    assert f"a text ends at: {id} <|im_end|>\n" in table
    shutil.copytree(tiny_chat_checkpoint, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    code, table, _ = plan(tmp_path / "broken")
    assert code == 0
    assert f"a text ends at: {id} (of the configuration alone: {tmp_path}/broken/tokenizer.json: not valid" in table


def test_a_hub_id_whose_tokenizer_is_downloaded_lists_its_endings(config_only, tiny_chat_checkpoint, tmp_path):
    assert json.loads(plan(config_only, "--json")[1])["endings"] == {"2": ""}
    (path,) = tmp_path.rglob("config.json")
    for file in tiny_chat_checkpoint.glob("*.json"):
        shutil.copy(file, path.parent)
    (text,) = json.loads(plan(config_only, "--json")[1])["endings"].values()
    assert text == "<|im_end|>"


def test_a_type_that_nobody_names_is_asked_for(config_only, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1 << 30)
    assert plan(config_only)[0] == 0
    (path,) = tmp_path.rglob("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": None}))
    assert "dtype = 'auto': config.json names none" in plan(config_only)[2]
    assert plan(config_only, "--dtype", "bfloat16")[0] == 0


def test_the_table_says_what_packing_takes(tiny_checkpoint):
    folder = tiny_checkpoint("llama")
    assert ("while they are packed" in plan(folder, "--dtype", "float16")[1]) is can_pack()
    assert "while they are packed" not in plan(folder, "--dtype", "float32")[1]


@pytest.mark.parametrize(
    "text, count",
    [("24GiB", 24 << 30), ("500MB", 500_000_000), ("1.5G", 1_500_000_000), ("7", 7), ("2 kib", 2048), ("1T", 10**12)],
)
def test_sizes_are_read(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1.G", "5 apples", "1iB", "1e9", "9" * 400, "8388608TiB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(RingkvError, match="memory = "):
        parse_size(text)


@pytest.mark.parametrize("policy, fits", [("random", True), ("vase-attnv", False)])
def test_the_longest_prompt_that_an_option_takes_is_planned_or_refused(tiny_checkpoint, policy, fits):
    """Scores of a prompt are computed in working memory of a fixed size, where one query must find room."""
    code, out, err = plan(tiny_checkpoint("qwen3"), "--prompt", 2**31 - 1, "--policy", policy, "--memory", "1GiB")
    if fits:
        assert (code, err) == (0, "")
        assert "2147483647 tokens" in out
        assert "this does not fit" in out
    else:
        assert (code, out) == (2, "")
        assert err.startswith("ringkv: prompt = 2147483647: one query over ")
