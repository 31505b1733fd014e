"""Rows of a file of prompts: JSON lines, checked before anything runs."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.engine import SamplingParams
from ringkv.errors import RingkvError, is_int, naming

OURS = "ringkv"  # the key of a result
# Objects and lists within each other. Python's own limit depends on who calls, and a row is written and read again.
DEEPEST = 200
_TOO_DEEP = f"nested too deep; accepted are {DEEPEST} objects and lists within each other"
_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams))
# Fields that look like options, of this program or of others: beside ``params`` nothing reads them.
_OPTIONS = {
    *(*_PARAMS, "model", "system", "raw", "budget", "window", "policy", "retention", "sinks", "pin"),
    *("tools", "tool_choice", "functions", "documents", "response_format", "extra_body", "best_of", "stream"),
    *("max_completion_tokens", "max_new_tokens", "min_new_tokens", "max_length", "stop_sequences", "stop_strings"),
    *("frequency_penalty", "length_penalty", "num_beams", "num_return_sequences", "do_sample", "typical_p"),
    *("enable_thinking", "reasoning_effort", "chat_template", "chat_template_kwargs", "top_logprobs"),
    *("parameters", "sampling_params", "sampling_parameters", "generation_config"),
}


@dataclass(frozen=True)
class Row:
    """A prompt of the file.

    Attributes:
        line: from 1, blank lines counted.
        id: as given, else the line as a string; ``key`` is what tells rows apart.
        kind: "prompt", a text or token ids, or "messages".
        prompt: its value, not checked yet.
        params: what the row sets of SamplingParams, not checked yet.
        carried: the other fields, for its results.
        digest: of the whole row.
    """

    line: int
    id: str | int
    kind: str
    prompt: Any
    params: Any
    carried: dict[str, Any]
    digest: str

    @property
    def key(self) -> str:
        """The id as a string."""
        return str(self.id)

    @property
    def warnings(self) -> list[str]:
        """A line for the carried fields that look like options: what stands beside ``params`` does nothing."""
        plain = {name: re.sub("(?<=[a-z])(?=[A-Z])|-", "_", name).lower() for name in self.carried}
        found = [name for name in plain if plain[name] in _OPTIONS]
        does, it = ("does", "it is") if len(found) == 1 else ("do", "they are")
        beside = f"{', '.join(found)} beside params {does} nothing: {it} carried through"
        return [f"{beside}; accepted in params are names of SamplingParams"] if found else []

    def sampling(self, base: SamplingParams, run_seed: int) -> SamplingParams:
        """The run's params with what the row sets, and the row's own seed.

        Raises:
            RingkvError: an unknown name, or a value that is not accepted.
        """
        if not isinstance(self.params, Mapping):
            raise RingkvError.bad("params", self.params, "an object with names of SamplingParams")
        for name in self.params:
            if name not in _PARAMS:
                close = difflib.get_close_matches(name, _PARAMS, 1)
                raise RingkvError(f"params: {name} is not known; accepted is {' or '.join(close or _PARAMS)}")
        sampling = base.replace(**{**self.params, "seed": self.params.get("seed")})
        return sampling if sampling.seed is not None else sampling.replace(seed=row_seed(run_seed, self.key))

    def check_prompt(self) -> None:
        """Refuse a prompt that is of no kind that an engine takes."""
        items = self.prompt if isinstance(self.prompt, list) else [None]
        if self.kind == "messages" and not all(isinstance(item, Mapping) for item in items):
            raise RingkvError.bad("messages", self.prompt, "a list of messages")
        ids = all(is_int(item) for item in items)
        if self.kind == "prompt" and not isinstance(self.prompt, str) and not ids:
            raise RingkvError.bad("prompt", self.prompt, "a text or a list of token ids")


def row_seed(run_seed: int, key: str) -> int:
    """The first 8 bytes of SHA-256 of (run seed, row id): never of the order of rows."""
    digest = hashlib.sha256(f"{run_seed},{key}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def read_rows(source: str | os.PathLike[str]) -> list[Row]:
    """All rows of a file, or of stdin ("-").

    Raises:
        RingkvError: the file cannot be read, or a line is no row; it names the line.
    """
    with naming(f"input = {str(source)!r}"):
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    name = "stdin" if source == "-" else str(source)
    rows: dict[str, Row] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            with naming(f"{name}: line {number}"):
                row = _row(number, line)
                if row.key in rows:
                    raise RingkvError(f"id {row.id!r} is also that of line {rows[row.key].line}")
            rows[row.key] = row
    return list(rows.values())


def _row(number: int, line: bytes) -> Row:
    given = parse_object(line)
    fields = dict(given)
    kinds = [kind for kind in ("prompt", "messages") if kind in fields]
    if len(kinds) != 1:
        has = ", ".join(given) or "nothing"
        raise RingkvError(f"a row has either prompt or messages; this one has {has}")
    if OURS in fields:
        raise RingkvError(f"{OURS} is the name of results; accepted is a row without it")
    id = fields.pop("id", str(number))
    if not (isinstance(id, str) or is_int(id)):
        raise RingkvError.bad("id", id, "a string or a whole number")
    params = fields.pop("params", {})
    canonical = json.dumps(given, sort_keys=True).encode()
    prompt = fields.pop(kinds[0])
    return Row(number, id, kinds[0], prompt, params, fields, hashlib.sha256(canonical).hexdigest()[:32])


def parse_object(line: bytes) -> dict[str, Any]:
    """A line of JSON that is an object.

    Raises:
        RingkvError: it is not; without the place, which the caller knows.
    """
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_number, parse_float=_number)
    except UnicodeDecodeError as error:
        raise RingkvError(f"byte {error.start + 1} is not UTF-8") from error
    except RecursionError as error:
        raise RingkvError(_TOO_DEEP) from error
    except ValueError as error:
        raise RingkvError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RingkvError(f"accepted is a JSON object; this is a {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inner = (one for each in level for one in (each.values() if isinstance(each, dict) else each))
        level = [one for one in inner if isinstance(one, (dict, list))]
        if not level:
            return value
    raise RingkvError(_TOO_DEEP)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
