"""Fuzz the loading of checkpoints: a damaged one must load with the logits of transformers, or be refused in one line.

    python bench/fuzz.py --cases 10000

Small checkpoints that transformers saved are mutated one file at a time: the configuration, the index, a safetensors
header or the tokenizer. A case fails if it raises anything but RingkvError, if the message does not name the cause,
if it takes more than 5 seconds, if a file outside the folder of the checkpoint is opened, or if logits or token ids
differ. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv.apps.measure.peer import quiet
from ringkv.bench.common import finish
from ringkv.bench.mutations import INDEX, MUTATIONS, make_bases
from ringkv.errors import RingkvError
from ringkv.models.checkpoints.open import open_checkpoint
from ringkv.models.decoder import Decoder, Layer
from ringkv.models.families import HARMLESS
from ringkv.models.weights import load_decoder

LIMIT_S = 5.0
REQUIRED = {"factor", "low_freq_factor", "high_freq_factor"}
CONFIGURATIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CPU = torch.device("cpu")
IDS = torch.tensor([5, 17, 3, 250, 99, 5, 17, 64, 1, 2, 200, 31])
TEXT = "Why is the sky blue? 하늘 <think>x</think> <x>Why <y> <|im_end|> </s>1234"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), options.cases, options.seed, options.first)
    finish(report)
    sys.exit(bool(report["failures"]))


def run(folder: Path, cases: int, seed: int = 0, first: int = 0) -> dict[str, Any]:
    """Fuzz in an empty folder. The report counts the outcomes and lists each failure with the number of its case."""
    with quiet():
        bases = make_bases(folder / "bases")
        for base in bases:
            Case(base, base, "untouched").check()
        outcomes: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {kind: Counter() for kind in MUTATIONS}
        failures, slowest, begin = [], 0.0, time.perf_counter()
        for number in range(first, first + cases):
            rng = random.Random(f"{seed}/{number}")
            kind = rng.choice(list(MUTATIONS))
            base = rng.choice([base for base in bases if kind != "index" or (base / INDEX).exists()])
            copy = folder / "case"
            shutil.copytree(base, copy)
            told = MUTATIONS[kind](rng, copy)
            case = Case(base, copy, told)
            outcome = case.check()
            if case.failure:
                failures.append(f"case {number}, {kind}, {base.name}: {told}: {case.failure}")
            outcomes[outcome] += 1
            kinds[kind][outcome] += 1
            slowest = max(slowest, case.seconds)
            shutil.rmtree(copy)
    return {
        "cases": cases,
        "seed": seed,
        **{outcome: outcomes[outcome] for outcome in ("loaded", "refused", "failed")},
        "kinds": {kind: dict(counts) for kind, counts in kinds.items()},
        "slowest_s": round(slowest, 3),
        "total_s": round(time.perf_counter() - begin, 1),
        "failures": failures,
    }


class Case:
    """One mutated folder. ``check`` returns the outcome and sets ``failure`` and ``seconds``."""

    def __init__(self, base: Path, folder: Path, told: str) -> None:
        self.base, self.folder, self.told = base, folder, told
        self.failure, self.seconds = "", 0.0

    def check(self) -> str:
        begin = time.perf_counter()
        try:
            with time_limit(), opens_nothing_outside(self.folder):
                logits, tokens = self._load()
        except RingkvError as error:
            self.seconds = time.perf_counter() - begin
            self._check_message(str(error))
            return "failed" if self.failure else "refused"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.failure = f"{type(error).__name__}: {str(error)[:300]}"
            return "failed"
        self.seconds = time.perf_counter() - begin
        try:
            self._compare(logits, tokens)
        except Exception as error:
            self.failure = f"loaded, but transformers says {type(error).__name__}: {str(error)[:300]}"
        return "failed" if self.failure else "loaded"

    def _load(self) -> tuple[Tensor, list[int] | None]:
        checkpoint = open_checkpoint(self.folder)
        tokenizer = checkpoint.tokenizer()
        logits = plain_logits(load_decoder(checkpoint, CPU, torch.float32), IDS)
        if tokenizer is None:
            return logits, None
        tokenizer.decode(tokens := tokenizer.encode(TEXT))
        return logits, tokens

    def _check_message(self, message: str) -> None:
        """Fail unless the message is one line that names a file, a key or a tensor."""
        files = [folder / name for folder in (self.base, self.folder) for name in CONFIGURATIONS]
        text = "".join(path.read_text(errors="replace") for path in files if path.exists())
        keys = {ascii(key[:20])[1:-1] for key in re.findall(r'"([^"]+)":', text)} | REQUIRED
        named = any(re.search(rf"{re.escape(key)}\S* (= |is missing)", message) for key in keys)
        named = named or re.search(r"\.(json|jinja|safetensors)\b|model\.\w+\.|lm_head", message) is not None
        if "\n" in message or len(message) > 4000 or not named:
            self.failure = f"the message names no cause: {message[:300]!r}"

    def _compare(self, logits: Tensor, tokens: list[int] | None) -> None:
        wanted = reference_logits(self.folder)
        error = (logits - wanted).abs().max()
        if not error <= 1e-4 * wanted.abs().max():
            self.failure = f"logits differ by {error:.3g} of {wanted.abs().max():.3g}"
        if tokens is not None and (ids := reference_ids(self.folder)) not in (None, tokens):
            self.failure = f"token ids differ: {tokens}, and not {ids}"


def plain_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits [n, vocab] under causal attention without any cache."""
    angles = decoder.angles(torch.arange(len(ids)), len(ids))

    def attention(layer: Layer, qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in decoder.split(layer, qkv, angles[layer.index]))
        k, v = (x.repeat_interleave(decoder.config.group, dim=0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    with torch.no_grad():
        return decoder.logits(decoder.forward(ids, attention))


def reference_logits(folder: Path) -> Tensor:
    """The logits of transformers; if it refuses the files, of the files without the keys that we call harmless."""
    from transformers import AutoModelForCausalLM

    @torch.no_grad()
    def logits() -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval()(IDS[None]).logits[0]

    try:
        return logits()
    except Exception:
        path, meaningful = folder / "config.json", {"sliding_window", "num_key_value_heads"}
        config = {
            key: value
            for key, value in json.loads(path.read_text()).items()
            if key not in HARMLESS and (value is not None or key in meaningful)
        }
        if set(config.get("layer_types", ())) == {"full_attention"}:
            del config["layer_types"]
        eps = float(config.get("rms_norm_eps", 1e-6))
        path.write_text(json.dumps(config | {"pad_token_id": None, "rms_norm_eps": eps}))
        if (path := folder / INDEX).exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {}}))
        return logits()


def reference_ids(folder: Path) -> list[int] | None:
    """transformers' ids of the text, by tokenizer.json whatever class the configuration names; None if it refuses."""
    from transformers import PreTrainedTokenizerFast

    try:
        ids: list[int] = PreTrainedTokenizerFast.from_pretrained(folder).encode(TEXT, add_special_tokens=False)
    except Exception:
        return None
    return ids


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_watched: list[Path] = []
_strays: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes):
        path = Path(arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]).absolute()
        library = any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev"))
        own = path.suffix in (".py", ".pyc") or "__pycache__" in path.parts
        if not path.is_relative_to(_watched[0]) and not library and not own:
            _strays.append(str(path))


sys.addaudithook(_audit)


@contextlib.contextmanager
def opens_nothing_outside(folder: Path) -> Iterator[None]:
    """Raise if Python opened a file outside the folder meanwhile. Files that safetensors opens itself are not seen."""
    _strays.clear()
    _watched[:] = [folder.absolute()]
    try:
        yield
    finally:
        _watched.clear()
    if _strays:
        raise PermissionError(f"opened outside the folder: {_strays[:3]}")


if __name__ == "__main__":
    main()
