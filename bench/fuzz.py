"""Fuzz the loading of checkpoints: a damaged one must do as transformers does with it, or be refused in one line.

    python bench/fuzz.py --cases 10000

Small checkpoints that transformers saved are mutated one file at a time: the configuration, the index, a safetensors
header, the tokenizer and the files that name its tokens, the chat template, or generation_config.json. A case fails if
it raises anything but RingkvError, if the message does not name the cause, if it takes more than 5 seconds of processor
time, if a file outside the folder of the checkpoint is opened, or if logits, the ids of a text or of a short chat, or
the greedy tokens of a few steps differ, unless transformers refuses the file. Greedy tokens may differ where a warning
names what was not applied. The last line is JSON.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringkv import Engine, RingConfig, SamplingParams
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
CONFIGURATIONS = (
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "generation_config.json",
)
NAMED = r"\.(json|jinja|safetensors)\b|model\.\w+\.|lm_head|^chat template: |the control token '"
CPU = torch.device("cpu")
IDS = torch.tensor([5, 17, 3, 250, 99, 5, 17, 64, 1, 2, 200, 31])
TEXT = "Why is the sky blue? 하늘 <think>x</think> <x>Why <y> <|im_end|> </s>1234"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who is the sky? 하늘"},
    {"role": "assistant", "content": "  Blue \n"},
    {"role": "user", "content": "And 'the' sea?"},
]
STEPS = 6
RING = RingConfig(budget=40, window=8, policy="full")


@dataclass(frozen=True)
class Loaded:
    """What became of a folder.

    Attributes:
        logits: of ``IDS``, [n, V].
        text, chat: the ids of ``TEXT`` and ``CHAT``; None without a tokenizer, or without a template.
        said: the greedy tokens after ``IDS``; None where a warning says that something was not applied.
        endings: the ids at which a text ends.
        drawable: the ids that may be drawn.
        generation_config: the keys of the file.
    """

    logits: Tensor
    text: list[int] | None
    chat: list[int] | None
    said: list[int] | None
    endings: Collection[int]
    drawable: list[int]
    generation_config: Mapping[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """What a caller must say for a few greedy tokens, as transformers' names: as little as the file leaves."""
        theirs = self.generation_config.get("max_new_tokens")
        short = type(theirs) is int and 1 <= theirs <= STEPS
        greedy = self.generation_config.get("do_sample") is False
        return ({} if short else {"max_new_tokens": STEPS}) | ({} if greedy else {"do_sample": False})


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
        Case(bases[0], bases[0], "").check()  # imports and compiles what the others find
        untouched = [Case(base, base, base.name) for base in bases]
        failures = [f"{case.told}, untouched: {case.failure}" for case in untouched if case.check() != "loaded"]
        outcomes: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {kind: Counter() for kind in MUTATIONS}
        slowest, begin = 0.0, time.perf_counter()
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
                loaded = self._load()
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
            self._compare(loaded)
        except Exception as error:
            self.failure = f"loaded, but transformers says {type(error).__name__}: {str(error)[:300]}"
        return "failed" if self.failure else "loaded"

    def _load(self) -> Loaded:
        checkpoint = open_checkpoint(self.folder)
        tokenizer, generation_config = checkpoint.tokenizer(), checkpoint.generation_config
        decoder = load_decoder(checkpoint, CPU, torch.float32)
        engine = Engine(decoder, tokenizer, ring=RING, backend="torch", generation_config=generation_config)
        prompts = engine.prompts
        text: list[int] | None = None
        chat: list[int] | None = None
        if tokenizer is not None:
            tokenizer.decode(text := tokenizer.encode(TEXT))
        if tokenizer is not None and prompts.template is not None:
            chat = prompts.encode(CHAT)
            # What reads as a control token in a message is plain text here, and is not in transformers.
            chat = None if _forged(tokenizer.control_tokens) else chat
        loaded = Loaded(
            logits=plain_logits(decoder, IDS),
            text=text,
            chat=chat,
            said=None,
            endings=prompts.endings,
            drawable=sorted({*range(prompts.vocabulary)} - prompts.holes),
            generation_config=generation_config,
        )
        options = loaded.options
        params = SamplingParams(
            max_tokens=options.get("max_new_tokens"), temperature=0 if "do_sample" in options else None
        )
        done = engine.generate(IDS.tolist(), params)
        assert done.error is None, done.error
        asked_in_vain = any("was not applied" in warning for warning in done.warnings)
        return loaded if asked_in_vain else replace(loaded, said=done.token_ids)

    def _check_message(self, message: str) -> None:
        """Fail unless the message is one line that names a file, a key or a tensor."""
        files = [folder / name for folder in (self.base, self.folder) for name in CONFIGURATIONS]
        text = "".join(path.read_text(errors="replace") for path in files if path.exists())
        keys = {ascii(key[:20])[1:-1] for key in re.findall(r'"([^"]+)":', text)} | REQUIRED
        named = any(re.search(rf"{re.escape(key)}\S* (= |is missing)", message) for key in keys)
        named = named or re.search(NAMED, message) is not None
        if "\n" in message or len(message) > 4000 or not named:
            self.failure = f"the message names no cause: {message[:300]!r}"

    def _compare(self, loaded: Loaded) -> None:
        with torch.no_grad():
            model = reference_model(self.folder)
            wanted = model(IDS[None]).logits[0]
        error = (loaded.logits - wanted).abs().max()
        if not error <= 1e-4 * wanted.abs().max():
            self.failure = f"logits differ by {error:.3g} of {wanted.abs().max():.3g}"
            return
        tokenizer = reference_tokenizer(self.folder)
        for what, ours, theirs in (
            ("token ids", loaded.text, lambda: tokenizer.encode(TEXT, add_special_tokens=False)),
            ("ids of the chat", loaded.chat, lambda: reference_chat(tokenizer)),
            ("greedy tokens", loaded.said, lambda: reference_tokens(model, tokenizer, self.folder, loaded)),
        ):
            if ours is not None and not self.failure and (found := _unless_refused(theirs)) not in (None, ours):
                at = next((at for at, pair in enumerate(zip(ours, found, strict=False)) if len({*pair}) > 1), 0)
                self.failure = f"{what} differ at {at}: {ours[at : at + 9]}, and not {found[at : at + 9]}"


def plain_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits [n, vocab] under causal attention without any cache."""
    angles = decoder.angles(torch.arange(len(ids)), len(ids))

    def attention(layer: Layer, qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in decoder.split(layer, qkv, angles[layer.index]))
        k, v = (x.repeat_interleave(decoder.config.group, dim=0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)

    with torch.no_grad():
        return decoder.logits(decoder.forward(ids, attention))


def reference_model(folder: Path) -> Any:
    """The model of transformers; if it refuses the files, of the files without the keys that we call harmless."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    def model() -> Any:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(folder, generation_config=GenerationConfig(), **options).eval()

    try:
        whole = model()
        whole(IDS[None])  # a mistral with layer_types is taken for a ministral, which fails here without a window
        return whole
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
        return model()


def reference_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer, by tokenizer.json whatever class the configuration names; None if it refuses."""
    from transformers import PreTrainedTokenizerFast

    return _unless_refused(lambda: PreTrainedTokenizerFast.from_pretrained(folder))


def reference_chat(tokenizer: Any) -> list[int]:
    """transformers' ids of the chat, with a generation prompt.

    Raises:
        Exception: transformers refuses the template, or the template prints an address, which is another each time.
    """
    if " at 0x" in tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False):
        raise ValueError("the template prints an address")
    ids: list[int] = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    return ids


def reference_tokens(model: Any, tokenizer: Any, folder: Path, ours: Loaded) -> list[int]:
    """The greedy tokens of transformers, by the generation_config.json of a folder, of the ids that we would draw.

    Raises:
        Exception: transformers refuses the file, or ends a text at an id at which we do not.
    """
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    model.generation_config = GenerationConfig.from_pretrained(folder) if path.exists() else GenerationConfig()
    named = model.generation_config.eos_token_id

    def drawable(_: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_copy(1, at, scores[:, at])

    at = torch.tensor(ours.drawable)
    said = model.generate(
        IDS[None],
        attention_mask=torch.ones_like(IDS[None]),
        tokenizer=tokenizer,
        logits_processor=[drawable],
        eos_token_id=[*ours.endings] or None,
        return_dict_in_generate=False,
        **ours.options,
    )
    missing = {*(named if isinstance(named, list) else [named])} - {*ours.endings, None}
    return [*said[0, len(IDS) :].tolist(), *(f"and ends at {id}" for id in missing)]


def _unless_refused(value: Callable[[], Any]) -> Any:
    """The value; None where transformers refuses."""
    try:
        return value()
    except Exception:
        return None


def _forged(control_tokens: Collection[str]) -> bool:
    said = json.dumps(CHAT, ensure_ascii=False)
    return any(token in said for token in control_tokens)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S:g} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
