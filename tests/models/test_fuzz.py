"""The fuzzer of bench/, in short: nothing but right logits and one-line refusals, and enough of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringkv.bench import fuzz


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
    """Wrong logits, a traceback, a hang, a silent message and a read outside the folder each fail a case."""
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
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

    def hangs(*_: Any) -> None:
        while True:
            pass

    load_decoder = fuzz.load_decoder
    with fuzz.quiet():
        assert broken(another).startswith("logits differ by")
        assert broken(lambda *_: 1 / 0).startswith("ZeroDivisionError")
        assert broken(hangs).startswith("TimeoutError")
        assert broken(nothing).startswith("the message names no cause")
        assert broken(lambda *_: (tmp_path / "outside.json").read_text()).startswith(
            ("PermissionError", "AttributeError")
        )
