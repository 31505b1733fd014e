"""Rows of a file of prompts: JSON lines, checked before anything runs, and each read again when it is its turn."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, cast

import numpy as np

from ringkv.engine import SamplingParams
from ringkv.errors import RingkvError, is_int, naming

OURS = "ringkv"  # the key of a result
# Objects and lists within each other. Python's own limit depends on who calls, and a row is written and read again.
DEEPEST = 200
_TOO_DEEP = f"nested too deep; accepted are {DEEPEST} objects and lists within each other"
_SPOOLED = 1 << 24  # bytes of an input that cannot be read twice which are kept in memory
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


class Rows:
    """The rows of a file of prompts, from 0. Of each, 48 bytes are kept in memory: where it lies, and hashes.

    Args:
        source: a file, or "-" for stdin. What cannot be read twice is copied to a temporary file.
        samples: how many results a row shall have.

    Attributes:
        first: of each row, the number of its first result; a last entry says how many there are in all.
        entries: a temporary file of each row's key and digest, as ``settings`` keeps them.

    Raises:
        RingkvError: the file cannot be read, a line is no row, or two have one id; it names the line.
    """

    def __init__(self, source: str | os.PathLike[str], samples: Callable[[Row], int]) -> None:
        self._name = "stdin" if source == "-" else str(source)
        self._input = f"input = {str(source)!r}"
        self._reading = threading.Lock()  # an engine may take prompts in one thread and give results in another
        self.first = array("Q", [0])
        self._next, self._twins = 0, False  # where a key is looked for first; whether two have one hash
        self._offsets, self._lines, self._keys, self._digests = array("Q"), array("Q"), array("q"), bytearray()
        with naming(self._input):
            self._file = _twice_readable(source)
        self.entries: Any = tempfile.SpooledTemporaryFile(_SPOOLED)  # noqa: SIM115 - closed with this
        try:
            self._read(samples)
            self._refuse_twins()
        except BaseException:
            self.close()
            raise

    def _read(self, samples: Callable[[Row], int]) -> None:
        usual = samples(Row(1, "", "prompt", "", {}, {}, ""))
        for number, offset, line in self._numbered():
            try:
                given, id, kind = _checked(number, line)
            except RingkvError as error:
                raise RingkvError(f"{self._name}: line {number}: {error}") from error
            key, digest = str(id), _digest(given)
            self.entries.write(settings_entry(key, digest, first=not self._lines))
            self._offsets.append(offset)
            self._lines.append(number)
            self._keys.append(hash(key))
            self._digests += bytes.fromhex(digest)
            own = given.get("params", {})
            sets = not isinstance(own, dict) or "n" in own
            count = samples(_made(number, given, id, kind, digest)) if sets else usual
            self.first.append(self.first[-1] + count)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int) -> Row:
        """A row, read again.

        Raises:
            RingkvError: it is another one by now.
        """
        number = self._lines[place]
        with self._reading, naming(self._input):
            self._file.seek(self._offsets[place])
            line = self._file.readline()
        with suppress(RingkvError):
            row = _row(number, line)
            if row.digest == self.digest(place):
                return row
        raise RingkvError(f"{self._name}: line {number} has changed since this run was begun")

    def place(self, key: str) -> int | None:
        """Which row has this key; None where none has. Other keys are taken for it once in 2^64 times."""
        own, place = hash(key), self._next
        if self._twins or place >= len(self) or self._keys[place] != own:  # mostly they are asked for in their order
            hashes, places = self._sorted
            first, end = (np.searchsorted(hashes, own, side) for side in ("left", "right"))
            found = places[first:end].tolist()
            if len(found) > 1:
                found = [each for each in found if self[each].key == key]
            if not found:
                return None
            place = found[0]
        self._next = place + 1
        return place

    def place_of(self, row: Row) -> int:
        """Which one a row of these is."""
        return bisect_left(self._lines, row.line)

    def digest(self, place: int) -> str:
        """The digest of a row."""
        return self._digests[16 * place : 16 * place + 16].hex()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self.entries.close()

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of the keys in their order, and which rows they are of, those of one hash in the file's order."""
        hashes = np.asarray(self._keys)
        places = np.argsort(hashes, kind="stable")
        return hashes[places], places

    def _refuse_twins(self) -> None:
        """Refuse two rows of one id. Rows whose keys have one hash are read again; nearly always they are such."""
        hashes = np.sort(self._keys)
        twins = hashes[1:][hashes[1:] == hashes[:-1]]
        self._twins = len(twins) > 0
        lines: dict[str, int] = {}
        for place in np.flatnonzero(np.isin(self._keys, twins)).tolist() if self._twins else ():
            row = self[place]
            if (line := lines.setdefault(row.key, row.line)) != row.line:
                raise RingkvError(f"{self._name}: line {row.line}: id {row.id!r} is also that of line {line}")

    def _numbered(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset, line) of every line that is not blank."""
        offset = 0
        with naming(self._input):
            for number, line in enumerate(self._file, 1):
                if not line.isspace():
                    yield number, offset, line
                offset += len(line)


def settings_entry(key: str, digest: str, *, first: bool) -> bytes:
    """The line of a row in the settings, with the line end before it."""
    return f'{"" if first else ","}\n  {_CANONICAL.encode(key)}: "{digest}"'.encode()


def _twice_readable(source: str | os.PathLike[str]) -> IO[bytes]:
    """A file that is read from its beginning and can be read again."""
    if source == "-":
        return _copied(sys.stdin.buffer)
    file = open(source, "rb")  # noqa: SIM115 - Rows closes it
    if file.seekable():
        return file
    with file:
        return _copied(file)


def _copied(file: IO[bytes]) -> IO[bytes]:
    copy: Any = tempfile.SpooledTemporaryFile(_SPOOLED)  # noqa: SIM115 - Rows closes it
    shutil.copyfileobj(file, copy)
    copy.seek(0)
    return cast("IO[bytes]", copy)


def _row(number: int, line: bytes) -> Row:
    given, id, kind = _checked(number, line)
    return _made(number, given, id, kind, _digest(given))


def _made(number: int, given: dict[str, Any], id: str | int, kind: str, digest: str) -> Row:
    carried = {name: value for name, value in given.items() if name not in ("id", "params", kind)}
    return Row(number, id, kind, given[kind], given.get("params", {}), carried, digest)


def _checked(number: int, line: bytes) -> tuple[dict[str, Any], str | int, str]:
    """What a line holds, its id, and whether it has a "prompt" or "messages"."""
    given = parse_object(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    kind = "messages" if "messages" in given else "prompt"
    if kind not in given or (kind == "messages" and "prompt" in given):
        has = ", ".join(given) or "nothing"
        raise RingkvError(f"a row has either prompt or messages; this one has {has}")
    if OURS in given:
        raise RingkvError(f"{OURS} is the name of results; accepted is a row without it")
    id = given.get("id", str(number))
    if not (isinstance(id, str) or is_int(id)):
        raise RingkvError.bad("id", id, "a string or a whole number")
    return given, id, kind


def _digest(given: Mapping[str, Any]) -> str:
    """Half of the SHA-256 of a row, the same in whatever order its fields stand."""
    return hashlib.sha256(_CANONICAL.encode(given).encode()).hexdigest()[:32]


def parse_object(line: bytes) -> dict[str, Any]:
    """A line of JSON that is an object.

    Raises:
        RingkvError: it is not; without the place, which the caller knows.
    """
    try:
        value = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RingkvError(f"byte {error.start + 1} is not UTF-8") from error
    except RecursionError as error:
        raise RingkvError(_TOO_DEEP) from error
    except ValueError as error:
        raise RingkvError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RingkvError(f"accepted is a JSON object; this is a {type(value).__name__}")
    if line.count(b"{") + line.count(b"[") <= DEEPEST:
        return value
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


_DECODER = json.JSONDecoder(parse_constant=_number, parse_float=_number)
_CANONICAL = json.JSONEncoder(sort_keys=True)
