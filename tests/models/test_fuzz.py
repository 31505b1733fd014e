"""The fuzzer of bench/, in short: nothing but right logits and one-line refusals, and enough of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringkv import Engine
from ringkv.bench import fuzz
from ringkv.engine.prompts import Prompts
from ringkv.models.tokenizer import Tokenizer


def test_damaged_checkpoints_load_right_or_are_refused(tmp_path: Path) -> None:
    report = fuzz.run(tmp_path, 300)
    assert report["failures"] == []
    assert report["loaded"] + report["refused"] == 300
    assert min(report["loaded"], report["refused"]) >= 100
    for kind, outcomes in report["kinds"].items():
        assert outcomes["loaded"] >= 10, kind
        assert outcomes["refused"] >= 10, kind
    assert report["slowest_s"] < 5


def test_the_fuzzer_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong logits or ids, a traceback, a hang, a silent message, a read outside the folder: each fails a case."""
    base = fuzz.make_bases(tmp_path / "bases")[0]
    (tmp_path / "outside.json").write_text("{}")

    def broken(body: Any) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(fuzz, "load_decoder", body)
            case = fuzz.Case(base, base, "")
            assert case.check() == "failed"
        return str(case.failure)

    def another(checkpoint: Any, *where: Any) -> Any:
        decoder = load_decoder(checkpoint, *where)
        decoder.norm.mul_(1.01)
        return decoder

    def nothing(*_: Any) -> None:
        raise fuzz.RingkvError("something is wrong")

    def reads(*args: Any) -> Any:
        (tmp_path / "outside.json").read_text()
        return load_decoder(*args)

    def hangs(*_: Any) -> None:
        while True:
            pass

    def changed(owner: type, method: str, change: Callable[[Any], Any]) -> str:
        """The failure of a case in which a method returns something else."""
        right = getattr(owner, method)
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, lambda *args, **options: change(right(*args, **options)))
            case = fuzz.Case(base, base, "")
            assert case.check() == "failed"
        return str(case.failure)

    load_decoder = fuzz.load_decoder
    with fuzz.quiet():
        fuzz.Case(base, base, "").check()  # imports and compiles, which the others need not
        assert broken(another).startswith("logits differ by")
        assert broken(lambda *_: 1 / 0).startswith("ZeroDivisionError")
        assert broken(nothing).startswith("the message names no cause")
        assert broken(reads).startswith("PermissionError")
        assert changed(Tokenizer, "encode", lambda ids: [*ids[:-1], 5]).startswith("token ids differ at")
        assert changed(Prompts, "encode", lambda ids: [5, *ids[1:]]).startswith("ids of the chat differ at 0: [5, ")
        assert changed(Prompts, "encode", lambda ids: ids[:-1]).startswith("ids of the chat differ")
        less = changed(Engine, "generate", lambda done: replace(done, token_ids=done.token_ids[:-1]))
        assert less.startswith("greedy tokens differ at")
        monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
        assert broken(hangs).startswith("TimeoutError")


GENERATIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "greedy": ({"do_sample": False, "repetition_penalty": 2.0, "max_new_tokens": 3}, False),
    "a stop": ({"eos_token_id": list(range(320))}, False),
    "an end that we do not know": ({"eos_token_id": list(range(320))}, True),
    "suppressed": ({"suppress_tokens": list(range(1, 320, 2))}, False),
    "suppressed, and we do not": ({"suppress_tokens": list(range(1, 320, 2))}, True),
    "named": ({"no_repeat_ngram_size": 1}, False),
    "ignored": ({"no_repeat_ngram_size": 1, "num_beams": 3}, True),
    "sampled": ({"do_sample": True, "temperature": 50.0}, False),
    "refused there": ({"bad_words_ids": []}, False),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_an_option_that_is_ignored_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where we act on generation_config.json the tokens are transformers'; a case fails where we read none of it."""
    generation, ignored = GENERATIONS[name]
    base = fuzz.make_bases(tmp_path / "bases")[0]
    (base / "generation_config.json").write_text(json.dumps(generation))
    if ignored:
        nothing: dict[str, Any] = {"generation_config": {}}
        monkeypatch.setattr(fuzz, "Engine", lambda *args, **options: Engine(*args, **options | nothing))
    with fuzz.quiet():
        fuzz.Case(base, base, "").check()
        case = fuzz.Case(base, base, "")
        assert case.check() == ("failed" if ignored else "loaded"), case.failure
    assert case.failure.startswith("greedy tokens differ at" if ignored else "")
