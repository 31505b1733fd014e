"""The command line as a person or a script uses it: its output, its errors, its exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import shellingham
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ringkv import Engine, RingConfig, SamplingParams
from ringkv.apps.measure.peer import PEERS
from ringkv.apps.options import CHOICES, POLICY_NAMES
from ringkv.cli import app
from ringkv.engine.config import ON_REPETITION, PINS
from ringkv.engine.loading import DTYPES
from ringkv.engine.policies import POLICIES
from ringkv.kernels import backend

TINY = ["--budget", "24", "--window", "4", "--threads", "1"]


def run(*arguments, input=None, cwd=None, env=None):
    """The console script in a process of its own."""
    script = Path(sys.executable).with_name("ringkv")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", **(env or {})}
    data = input.encode() if isinstance(input, str) else input
    done = subprocess.run(
        [script, *map(str, arguments)], input=data or b"", capture_output=True, cwd=cwd, env=environment
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def tiny(tiny_chat_checkpoint):
    return tiny_chat_checkpoint


def test_generate_streams_text_to_stdout_and_a_summary_to_stderr(tiny):
    code, out, err = run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 60, "--seed", 1)
    assert code == 0
    assert out.endswith("\n")
    assert err.count("\n") == 1 + err.count("warning: ")
    assert "60 new tokens" in err
    assert "ring 28/28 slots" in err
    assert "seed 1]" in err
    again = run("generate", "-", "-m", tiny, *TINY, "--max-tokens", 60, "--seed", 1, "--quiet", input="Hi")
    assert again == (0, out, "")


def test_json_is_the_completion(tiny, tmp_path):
    (tmp_path / "prompt.txt").write_text("Hi")
    code, out, _ = run(
        "generate", "--prompt-file", tmp_path / "prompt.txt", "-m", tiny, *TINY, "--max-tokens", 40, "--json"
    )
    done = json.loads(out)
    assert code == 0
    assert done["completion_tokens"] == len(done["token_ids"]) == 40
    assert done["ring"]["capacity"] == 28
    assert done["ring"]["policy"] == "vase-attnv"
    names = {"text", "thinking", "token_ids", "prompt_tokens", "completion_tokens", "thinking_tokens", "answer_tokens"}
    names |= {"finish_reason", "stop_reason", "repetition", "sampling", "logprobs", "warnings", "error", "timing"}
    assert set(done) == names | {"sample", "model", "dtype", "backend", "ring"}


def test_stop_token_ids_end_the_text(tiny):
    """The first that is drawn does; the option may be repeated."""
    common = ["generate", "Hi", "-m", tiny, *TINY, "--temperature", 0, "--max-tokens", 6, "--json"]
    ids = json.loads(run(*common)[1])["token_ids"]
    done = json.loads(run(*common, "--stop-token-id", ids[4], "--stop-token-id", ids[2])[1])
    assert done["token_ids"] == ids[: 1 + min(ids.index(ids[2]), ids.index(ids[4]))]
    assert (done["finish_reason"], done["stop_reason"]) == ("stop", done["token_ids"][-1])


def test_several_samples_are_lines_of_json(tiny):
    code, out, _ = run(
        "generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 9, "--json", "-n", 3, "--lanes", 2, "--seed", 5
    )
    results = [json.loads(line) for line in out.splitlines()]
    assert (code, [one["sample"] for one in results]) == (0, [0, 1, 2])
    assert len({tuple(one["token_ids"]) for one in results}) == 3


def test_stats_is_the_whole_table(tiny):
    _, _, err = run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 60, "--stats", "--temperature", 0)
    for part in (
        "budget 24 + window 4 = 28 slots",
        "evictions",
        "temperature 0.0 (user)",
        "refreekv:threshold=0.01",
        "seed",
    ):
        assert part in err
    assert re.search(r"^ends at +257 <\|im_end\|>", err, re.M)
    _, _, short = run("generate", "Hi", "-m", tiny, "--max-tokens", 3)
    assert "0 evictions" in short


@pytest.mark.parametrize(
    "arguments, field",
    [
        (["--budget", "0"], "budget = 0"),
        (["--budget", "8", "--window", "8"], "window (8)"),
        (["--policy", "lru"], "policy = 'lru'"),
        (["--policy", "vase-attnv:x=1"], "vase-attnv"),
        (["--retention", "none"], "retention = 'none'"),
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--temperature", "warm"], "temperature = 'warm'"),
        (["--temperature", "nan"], "temperature = nan"),
        (["--budget", "9" * 5000], "budget = "),
        (["--budget", "9" * 30], "999: accepted is an int <= 2147483647 or 'auto'"),
        (["--max-tokens", "9" * 30], "999: accepted is an int <= 2147483647"),
        (["--threads", "9" * 20], "threads = 99999999999999999999: accepted is an int <= 1024"),
        (["--policy", "snapkv:kernel=99999999"], "policy snapkv: kernel = 99999999: accepted is an odd int <= 1024"),
        (["--policy", "curdkv:rank=99999999"], "policy curdkv: rank = 99999999: accepted is an int <= 1024"),
        (["--retry-errors"], "--retry-errors: it goes with --input"),
        (["--top-k", "9" * 30], "999: accepted is an int <= 2147483647"),
        (["-n", "65537"], "n = 65537: accepted is an int <= 65536"),
        (["--system", " "], "--system = ' ': accepted is a text with words"),
        (["--system", "x", "--raw"], "--system = 'x': accepted is none with --raw"),
        (["--window", "x"], "window = 'x'"),
        (["--sinks", "-1"], "sinks = -1"),
        (["--seed", "1.5"], "seed = 1.5"),
        (["--top-k", "many"], "top_k = 'many'"),
        (["--max-tokens", "1e3"], "max_tokens = 1000.0"),
        (["--threads", "none"], "threads = 'none'"),
        (["-n", "two"], "n = 'two'"),
        (["--lanes", "-2"], "lanes = -2"),
        (["--lanes", "65537"], "lanes = 65537: accepted is an int <= 65536 or 'auto'"),
        (["--pin", "all"], "pin = 'all'"),
        (["--stop", ""], "stop = "),
        (["--stop-token-id", "x"], "stop_token_ids = ['x']"),
        (["--stop-token-id", "99999999"], "stop_token_ids: token id = 99999999"),
        (["--dtype", "int8"], "dtype = 'int8'"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--backend", "jax"], "backend = 'jax'"),
        (["-m", "no/such"], "no/such"),
        (["-m", "./nowhere"], "nowhere"),
        (["--input", "x.jsonl"], "--input and --output"),
        (["--prompt-file", "nowhere.txt"], "prompt"),
        (["--max-thinking-tokens", "-1"], "max_thinking_tokens = -1"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(tiny, arguments, field):
    model = [] if "-m" in arguments else ["-m", str(tiny)]
    done = CliRunner().invoke(app, ["generate", "Hi", *model, *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    assert field in done.stderr
    assert done.stderr.startswith("ringkv: ")
    assert done.stderr.count("\n") == 1


def test_auto_generates_with_what_fits(tiny, monkeypatch):
    monkeypatch.setattr("ringkv.engine.memory.MOST_BUDGET", 70)
    monkeypatch.setattr("ringkv.engine.memory.MOST_LANES", 3)
    options = ["--budget", "auto", "--lanes", "auto", "--window", "4", "--max-tokens", "3", "--json"]
    done = CliRunner().invoke(app, ["generate", "Hi", "-m", str(tiny), *options])
    ring = json.loads(done.stdout)["ring"]
    assert (done.exit_code, ring["budget"], ring["capacity"]) == (0, 70, 74)
    one = CliRunner().invoke(app, ["generate", "Hi", "-m", str(tiny), *options, "--lanes", "1"])
    assert ring["bytes"] == 3 * json.loads(one.stdout)["ring"]["bytes"]


@pytest.mark.parametrize("option", ["--budget", "--lanes"])
def test_a_file_of_prompts_wants_sizes_that_a_resumed_run_has_too(tiny, tmp_path, option):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(app, ["generate", *files, "-m", str(tiny), option, "auto"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{option} = 'auto'" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.usefixtures("compiled")
def test_a_file_of_prompts_is_not_resumed_without_the_compiler_that_it_was_begun_with(tiny, tmp_path, monkeypatch):
    """Another path rounds in another way: from some token on the text may be another."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    out = tmp_path / "out.jsonl"
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--max-tokens", "3", "--quiet"]
    assert CliRunner().invoke(app, ["generate", *files, "-m", str(tiny)]).exit_code == 0
    before = out.read_bytes()
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
    monkeypatch.setattr(backend, "_not_compiled", lambda: "the compiler is gone")
    done = CliRunner().invoke(app, ["generate", *files, "-m", str(tiny)])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert 'backend was "native", now it is "torch"' in done.stderr
    assert out.read_bytes() == before
    monkeypatch.undo()
    assert CliRunner().invoke(app, ["generate", *files, "-m", str(tiny), "--backend", "native"]).exit_code == 0
    assert out.read_bytes().startswith(before)


@pytest.mark.parametrize("dtype", CHOICES["dtype"])
@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_a_file_of_prompts_records_the_backend_that_ran(tiny, tmp_path, dtype, asked):
    """Oracle: the results' own ``backend``, which is the engine's."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    out = tmp_path / "out.jsonl"
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--max-tokens", "2", "--quiet"]
    options = ["-m", str(tiny), "--dtype", dtype, "--backend", asked, "--budget", "24", "--window", "4"]
    assert CliRunner().invoke(app, ["generate", *files, *options]).exit_code == 0
    settings = json.loads((tmp_path / "out.jsonl.ringkv.json").read_text())["settings"]
    assert settings["backend"] == json.loads(out.read_text())["ringkv"]["backend"]
    if dtype in ("bfloat16", "float64") or asked == "torch":
        assert settings["backend"] == "torch"
    assert list(settings) == [
        *("model", "revision", "device", "dtype", "backend", "budget", "window", "policy", "retention", "sinks", "pin"),
        *("system", "raw", "lanes", "sampling"),
    ]


OWN_POLICY = """
from dataclasses import dataclass

from ringkv import Policy


@dataclass(frozen=True)
class Newest(Policy):
    name = "newest"
    shift: float = 0.0

    def priority(self, live):
        return self.shift - live.position[..., : live.candidates].float()
"""


def test_a_policy_of_the_users_own_is_found_in_the_current_folder(tiny, tmp_path):
    """Oracle: the same class, as an object given to an engine."""
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    options = ["-m", tiny, *TINY, "--max-tokens", 60, "--temperature", 0, "--on-repetition", "ignore", "--json"]
    code, out, err = run("generate", "Hi", *options, "--policy", "mine:Newest:shift=2", cwd=tmp_path)
    assert code == 0, err
    done, names = json.loads(out), {}
    assert (done["ring"]["policy"], done["ring"]["params"]) == ("mine:Newest", {"shift": 2.0})
    assert done["ring"]["evictions"] > 0
    exec(compile(OWN_POLICY, "mine.py", "exec", dont_inherit=True), names)
    with Engine.from_pretrained(tiny, ring=RingConfig(24, 4, names["Newest"](2.0)), threads=1) as engine:
        params = SamplingParams(temperature=0, max_tokens=60, on_repetition="ignore")
        assert engine.generate("Hi", params).token_ids == done["token_ids"]
    assert done["token_ids"] != json.loads(run("generate", "Hi", *options)[1])["token_ids"]
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    files = ["--input", "in.jsonl", "--output", "out.jsonl", "--max-tokens", 30]
    assert run("generate", *files, "-m", tiny, *TINY, "--policy", "mine:Newest", cwd=tmp_path)[0] == 0
    assert json.loads((tmp_path / "out.jsonl.ringkv.json").read_text())["settings"]["policy"] == "mine:Newest"
    assert json.loads((tmp_path / "out.jsonl").read_text())["ringkv"]["ring"]["policy"] == "mine:Newest"
    code, out, _ = run("plan", tiny, "--policy", "mine:Newest", "--json", cwd=tmp_path)
    assert (code, json.loads(out)["policy"]) == (0, "mine:Newest")
    code, out, err = run("generate", "Hi", "-m", tiny, "--policy", "mine:Newest", cwd="/")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        "ringkv: policy = 'mine:Newest': no module mine is found; accepted is module:Class, or full, "
    )


def test_what_nobody_expected_is_one_line_too(tiny, monkeypatch):
    monkeypatch.setattr("ringkv.apps.options.Options.engine", lambda *_: 1 / 0)
    done = CliRunner().invoke(app, ["generate", "Hi", "-m", str(tiny)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "ringkv: ZeroDivisionError: division by zero; --debug shows where\n"
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["generate", "Hi", "-m", str(tiny), "--debug"], catch_exceptions=False)


def test_debug_shows_the_traceback(tiny):
    assert "Traceback" in run("generate", "Hi", "-m", tiny, "--budget", 0, "--debug")[2]


def test_no_prompt_and_two_prompts_are_refused(tiny):
    def refused(*arguments, input=None):
        done = CliRunner().invoke(app, ["generate", "-m", str(tiny), *arguments], input=input)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    assert "prompt: give one" in refused()
    assert "prompt: give one" in refused("Hi", "--prompt-file", "x")
    assert "stdin: cannot be read as UTF-8 text" in refused("-", input=b"\xff\xfe")
    assert "prompt: it is empty" in refused("", "--raw")
    assert "prompt: it is empty" in refused("")
    assert "stdin: it is empty" in refused("-", input="")
    blank = "ringkv: prompt = ' \\n': accepted is a text with words, or any with --raw\n"
    assert refused(" \n") == refused(" \n", "--system", "x") == blank
    assert run("generate", " \n", "--raw", "-m", tiny, "--max-tokens", 1)[0] == 0


TEXTS = [b"a\r\nb\rc\n", b"\r\n", b"one\n\n", "ze\u0301 \u2028 \x85".encode()]


@pytest.mark.parametrize("data", TEXTS)
def test_a_prompt_is_what_its_bytes_say(tiny, tmp_path, data):
    """From a file, from stdin and in score, with and without a byte order mark; oracle: the engine, given the text."""
    with Engine.from_pretrained(tiny, ring=RingConfig(24, 4), threads=1) as engine:
        count = len(engine.encode(data.decode()))
    assert count == len(data), "the tokenizer has a token a byte"
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "prompt").write_bytes(mark + data)
        for given, stdin in (["--prompt-file", tmp_path / "prompt"], b""), (["-"], mark + data):
            arguments = ["generate", *given, "--raw", "-m", tiny, *TINY, "--max-tokens", 1, "--json", "--quiet"]
            done = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
            assert json.loads(done.stdout)["prompt_tokens"] == count
        for given, stdin in ((tmp_path / "prompt", b""), ("-", mark + data)):
            done = CliRunner().invoke(app, ["score", str(given), "-m", str(tiny), *TINY, "--json"], input=stdin)
            assert json.loads(done.stdout)["tokens"] == count
    done = CliRunner().invoke(app, ["generate", "-", "-m", str(tiny)], input=b"\xef\xbb\xbf")
    assert (done.exit_code, done.stderr) == (2, "ringkv: stdin: it is empty; accepted is a text\n")


@pytest.fixture(scope="module")
def broken(tiny, tmp_path_factory):
    """A checkpoint whose logits are no numbers."""
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = 3e38  # a number, which a file of weights may hold; its products are none
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_generation_that_fails_is_told_with_quiet_too(broken, tmp_path):
    """Oracle: the error in the JSON of the completion."""

    def ran(*arguments, input=None):
        done = CliRunner().invoke(app, [*arguments, "-m", str(broken), *TINY, "--quiet"], input=input)
        assert done.exit_code == 1
        return done.stdout, done.stderr

    out, err = ran("generate", "Hi", "--json")
    message = json.loads(out)["error"]["message"]
    assert err == f"ringkv: {message}\n"
    assert ran("generate", "Hi") == ("\n", err)
    out, err = ran("generate", "Hi", "-n", "2", "--json")
    assert (out.count("\n"), err) == (2, f"ringkv: {message}\n" * 2)
    assert ran("chat", input="Hi\n") == ("\n", f"error: {message}; the question was not kept\n")
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    for _ in ("a run", "one that has nothing to do"):
        out, err = ran("generate", *files)
        assert (out, err.split(",")[:2]) == ("", ["[1 of 1 results of 1 rows", " 1 failed"])


def test_quiet_is_quiet_where_nothing_failed(tiny, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--max-tokens", "2"]
    for _ in ("a run", "one that has nothing to do"):
        done = CliRunner().invoke(app, ["generate", *files, "-m", str(tiny), *TINY, "--quiet"])
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_a_file_of_prompts(tiny, tmp_path):
    rows = [{"prompt": "Hi"}, {"id": "b", "prompt": "Yo", "text": "mine", "params": {"max_tokens": 5}}, {"prompt": 3}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "generate",
        "--input",
        "in.jsonl",
        "--output",
        "out.jsonl",
        "-m",
        tiny,
        *TINY,
        "--max-tokens",
        30,
        "--seed",
        3,
    ]
    code, out, err = run(*command, cwd=tmp_path)
    results = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert (code, out) == (1, "")
    assert "1 failed" in err
    assert results["1"]["ringkv"]["completion_tokens"] == 30
    assert results["b"]["text"] == "mine"
    assert results["b"]["ringkv"]["completion_tokens"] == 5
    assert "prompt" in results["3"]["ringkv"]["error"]["message"]
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(*command, cwd=tmp_path)[0] == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before
    code, _, err = run(*command, "--budget", 25, cwd=tmp_path)
    assert (code, "budget" in err) == (2, True)
    code, out, _ = run(
        "generate", "--input", "-", "--output", "-", "-m", tiny, *TINY, "--max-tokens", 3, input='{"prompt":"a"}\n'
    )
    assert code == 0
    assert json.loads(out)["ringkv"]["completion_tokens"] == 3


def test_options_that_do_nothing_are_named(tiny, tmp_path):
    """Issue 14, 9: in the summary, in the JSON and in every line of a file of results."""
    common = ["-m", tiny, *TINY, "--max-tokens", 3]
    seed = "seed = -1 is a fixed seed, as every int is: leave it out to have one drawn"
    raw = "thinking = True does nothing: no chat template reads it (raw mode, or token ids)"
    _, _, err = run("generate", "Hi", *common, "--raw", "--thinking", "--seed", -1)
    assert f"warning: {raw}\nwarning: {seed}\n" in err
    assert json.loads(run("generate", "Hi", *common, "--raw", "--thinking", "--json")[1])["warnings"] == [raw]
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Hi", "temperature": 0}\n')
    code, out, err = run("generate", "--input", tmp_path / "in.jsonl", "--output", "-", *common, "--raw", "--seed", -1)
    first, second = sorted((json.loads(line) for line in out.splitlines()), key=lambda one: one["id"])
    assert (code, first["ringkv"]["warnings"]) == (0, [seed])
    assert second["ringkv"]["warnings"][1].startswith("temperature beside params does nothing")
    assert f"results with warnings: 2; the first warning: {seed}" in err
    score = ["score", str(tmp_path / "in.jsonl"), "-m", str(tiny), *TINY, "--seed", "-1"]
    assert CliRunner().invoke(app, score).stderr == f"warning: {seed}\n"
    assert json.loads(CliRunner().invoke(app, [*score, "--json"]).stdout)["warnings"] == [seed]


def test_score(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    code, out, _ = run("score", tmp_path / "text.txt", "-m", tiny, *TINY, "--backend", "torch", "--json")
    scored = json.loads(out)
    assert code == 0
    assert scored["tokens"] == 135
    assert (scored["backend"], scored["dtype"]["compute"]) == ("torch", "float32")
    assert scored["log_likelihood"] == pytest.approx(-scored["nll_per_token"] * 134)
    code, full, _ = run("score", tmp_path / "text.txt", "-m", tiny, "--budget", 200, "--policy", "full", "--json")
    assert json.loads(full)["nll_per_token"] != scored["nll_per_token"]
    assert run("score", tmp_path / "none.txt", "-m", tiny)[0] == 2


def test_calibrate(tiny, tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "stats.safetensors"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    assert run("calibrate", tiny, "--text", text, "--output", output, "--threads", 1) == (
        0,
        f"135 tokens, {output}\n",
        "",
    )
    calibrated = f"triattention:stats={output}"
    code, out, _ = run("score", text, "-m", tiny, *TINY, "--policy", calibrated, "--json")
    assert (code, json.loads(out)["policy"]) == (0, "triattention")
    assert (
        json.loads(out)["nll_per_token"]
        != json.loads(run("score", text, "-m", tiny, *TINY, "--json")[1])["nll_per_token"]
    )
    for given, message in (
        (
            ["--text", text, "--output", text],
            "--output '.*': this command names it twice; accepted is the name of a file",
        ),
        (["--text", tmp_path / "none", "--output", output], "--text '.*': cannot be read as UTF-8 text"),
        (["--text", text], "Missing option '--output'"),
    ):
        code, out, err = run("calibrate", tiny, *given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert re.search(message, err)


def test_policies():
    code, out, _ = run("policies", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert set(rows) == {
        "full",
        "streaming",
        "random",
        "value-range",
        "tova",
        "h2o",
        "snapkv",
        "rkv",
        "curdkv",
        "vase-attnv",
        "vase-dkv",
        "gkv",
        "expected-attention",
        "triattention",
    }
    assert rows["rkv"]["params"] == {"lam": 0.1, "kernel": 7, "threshold": 0.5}
    assert "2606.03928" in rows["vase-attnv"]["source"]
    _, table, _ = run("policies")
    assert all(name in table for name in rows)


def test_chat_in_a_pipe(tiny):
    turns = "Hi\n/nosuch thing\n/reset\nHi\n/help\n/quit\nnever\n"
    code, out, err = run("chat", "-m", tiny, *TINY, "--max-tokens", 20, "--temperature", 0, input=turns)
    assert code == 0
    assert "\x1b" not in out
    assert "/nosuch is no command" in out + err
    answer = json.loads(run("generate", "Hi", "-m", tiny, *TINY, "--max-tokens", 20, "--temperature", 0, "--json")[1])[
        "text"
    ]
    assert out.count(answer) == 2, "after /reset the same turn gives the same answer"


def start_endless(tiny):
    """A generation that goes on until somebody ends it."""
    command = ["generate", "Hi", "-m", tiny, *TINY, "--on-repetition", "ignore", "--max-tokens", 10**6]
    command += ["--temperature", 0, "--stop", "\x01never"]
    script = Path(sys.executable).with_name("ringkv")
    return subprocess.Popen([script, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_answer_with_130(tiny, number):
    process = start_endless(tiny)
    assert process.stdout.read(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_it_quietly(tiny):
    process = start_endless(tiny)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""


@pytest.mark.parametrize("arguments", ["policies", "--help", "generate -h", "plan {tiny}"])
def test_a_reader_that_is_gone_already_is_no_error(tiny, arguments):
    script = shlex.quote(str(Path(sys.executable).with_name("ringkv")))
    command = f"{script} {arguments.format(tiny=tiny)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    "command, code, message",
    [
        ("policies >&-", 0, ""),
        ("generate - -m {tiny} <&-", 2, "ringkv: stdin: it is empty; accepted is a text\n"),
        ("chat -m {tiny} --quiet <&-", 0, ""),
        ("policies > /dev/full", 1, "ringkv: stdout: No space left on device\n"),
        ("--help > /dev/full", 1, "ringkv: stdout: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(tiny, command, code, message):
    script = shlex.quote(str(Path(sys.executable).with_name("ringkv")))
    done = subprocess.run(["bash", "-c", f"{script} {command.format(tiny=tiny)}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, message)


COMMANDS = ["generate", "state", "chat", "score", "calibrate", "plan", "trace", "bench", "policies"]


def test_help_and_version():
    top = run("--help")[1]
    for command in COMMANDS:
        assert command in top
        code, out, _ = run(command, "--help", env={"COLUMNS": "200"})
        assert code == 0
        assert f"Usage: ringkv {command}" in out
    assert run()[:2] == (0, top)
    from ringkv import __version__

    assert run("--version")[1] == f"ringkv {__version__}\n"


@pytest.mark.parametrize(
    "command, options",
    [
        ("plan", {"--model", "--revision", "--device", "--dtype", "--lanes", "--memory", "--budget", "--window"}
        | {"--policy", "--retention", "--sinks", "--pin", "--prompt", "--debug", "--json", "--help"}),
        ("score", {"--model", "--revision", "--device", "--dtype", "--backend", "--threads", "--budget", "--window"}
        | {"--policy", "--sinks", "--seed", "--debug", "--json", "--help"}),
        ("calibrate", {"--model", "--revision", "--device", "--dtype", "--backend", "--threads", "--text", "--output"}
        | {"--debug", "--help"}),
        ("bench", {"--model", "--revision", "--device", "--dtype", "--backend", "--threads", "--window", "--retention"}
        | {"--sinks", "--budgets", "--lanes", "--policies", "--tokens", "--prompt", "--compare", "--debug", "--help"}),
    ],
)  # fmt: skip
def test_a_command_offers_what_it_uses_and_no_more(command, options):
    out = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    assert set(re.findall(r"│ [* ]*(--[a-z-]+)", out)) == options


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["--nosuch"], "No such option: --nosuch"),
        (["generate", "Hi", "--budgte", "3"], "No such option: --budgte (Possible options: --budget"),
        (["generate", "Hi", "there"], "extra argument(s) (there)"),
        (["generate", "Hi", "--seed"], "'--seed' requires an argument"),
        (["generate", "Hi", "--json=3"], "'--json' does not take a value"),
        (["score"], "Missing argument 'FILE'"),
        (["plan", "--temperature", "1"], "No such option: --temperature"),
        (["policies", "x"], "extra argument(s) (x)"),
    ],
)
def test_a_command_that_is_mistyped_is_told_in_one_line(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("ringkv: ")
    assert done.stderr.endswith("; -h lists what is accepted\n")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_two_models_are_one_too_many(tiny, command):
    done = CliRunner().invoke(app, [command, str(tiny), "--model", "owner/other"])
    assert (done.exit_code, done.stderr) == (
        2,
        f"ringkv: --model owner/other: {tiny} is named too; accepted is one of them\n",
    )
    same = CliRunner().invoke(app, ["plan", str(tiny), "--model", str(tiny), "--json"])
    assert json.loads(same.stdout)["model"] == str(tiny)


def complete(words, shell="bash"):
    """What a shell gets that asks for the end of a line, by the protocol of its script."""
    env = {"_RINGKV_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "_TYPER_COMPLETE_ARGS": words}
    env |= {"COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code, out, err = run(env=env)
    assert (code, err) == (0, "")
    return {line.partition("\t")[0] for line in out.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_shell_completes(shell):
    assert complete("ringkv ", shell) >= set(COMMANDS)
    assert complete("ringkv p", shell) == {"plan", "policies"}
    assert complete("ringkv generate --policy v", shell) == {"value-range", "vase-attnv", "vase-dkv"}
    assert complete("ringkv chat --policy ", shell) == set(POLICY_NAMES)
    assert complete("ringkv plan --pin ", shell) == {"none", "system", "prompt"}
    assert complete("ringkv bench --ret", shell) >= {"--retention"}


def test_completion_offers_what_is_accepted():
    assert sorted(POLICY_NAMES) == sorted(row["name"] for row in json.loads(run("policies", "--json")[1]))
    assert set(POLICY_NAMES) <= set(POLICIES)
    for name in CHOICES["retention"]:
        RingConfig(retention=name)
    assert CHOICES["pin"] == PINS
    assert CHOICES["on_repetition"] == ON_REPETITION
    assert CHOICES["dtype"] == ("auto", *DTYPES)
    assert CHOICES["compare"] == PEERS
    for name in CHOICES["backend"]:
        backend.check(name)


def test_the_script_for_a_shell_is_shown_and_installed(tmp_path):
    """From bash, whatever the tests were started by."""

    def from_bash(option):
        script = shlex.quote(str(Path(sys.executable).with_name("ringkv")))
        environment = {**os.environ, "HOME": str(tmp_path)}
        command = ["bash", "-c", f"{script} {option}; exit $?"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "_RINGKV_COMPLETE=complete_bash" in from_bash("--show-completion")
    from_bash("--install-completion")
    assert "_RINGKV_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "ringkv.sh").read_text()


@pytest.mark.parametrize("found", ["tcsh", None])
def test_without_a_shell_that_has_completion_the_command_says_what_is_accepted(found, monkeypatch):
    def detect_shell():
        if found is None:
            raise shellingham.ShellDetectionFailure
        return found, f"/bin/{found}"

    monkeypatch.setattr("shellingham.detect_shell", detect_shell)
    for option in ("--show-completion", "--install-completion"):
        done = CliRunner().invoke(app, [option])
        assert done.exit_code == 2
        assert f"here {found or 'no shell'}: accepted are bash, zsh, fish, powershell, pwsh" in done.output


def test_help_and_completion_import_nothing_heavy():
    heavy = "{'torch', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub', 'jinja2', 'triton', 'matplotlib'}"
    code = f"""
import sys
sys.argv = ["ringkv", *sys.argv[1:]]
from ringkv import cli
try:
    cli.main()
finally:
    loaded = sorted(({heavy} | {{'rich.progress', 'rich.live'}}) & set(sys.modules))
    assert not loaded, loaded
"""
    completion = {**os.environ, "_RINGKV_COMPLETE": "complete_bash", "COMP_WORDS": "ringkv chat --policy v"}
    completion["COMP_CWORD"] = "3"
    for arguments, env in (
        (["--help"], None),
        (["generate", "--help"], None),
        (["plan", "-h"], None),
        ([], completion),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, cwd="/")
        assert done.returncode == 0, done.stderr
        assert done.stdout
