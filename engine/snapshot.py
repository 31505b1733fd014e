"""A request in the middle of its text, as an object and as a file; neither grows with the text but for its token ids.

The file is safetensors: a lane of the ring and the token ids as tensors, and all else as JSON in its metadata. What is
not in it (the text, half a character, a stop string that is half matched, what loops) follows from the token ids.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringkv.engine.config import SamplingParams
from ringkv.errors import MOST, RingkvError, check_int, is_int, naming, size
from ringkv.files import replacing, write_all

FORMAT, VERSION = "ringkv snapshot", 1
MOST_HEADER = 1 << 24  # bytes of a file's header
LOGITS = "logits"  # of the last token that was read, where the next one was not drawn yet
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
_IDS = ("ids.prompt", "ids.tokens", "ids.forced")
_LOGPROBS = "logprobs"
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(SamplingParams)}
_TAILS, _ENDINGS = ("answer", "system", "developer", "assistant"), ("", "stop", "length", "repetition", "cancelled")
# What the JSON says of the request, with the type of each.
_FIELDS = {"seed": int, "sample": int, "pin": int, "inside": bool, "tail": str, "ended": str, "warnings": list}
_FIELDS |= {"retained": list, "passed": list}

More: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that a request needs to go on: ``Engine.stream``, ``generate`` and ``iterate`` take one as a prompt.

    It shares no memory with the engine, and is never changed: any number of requests may go on from it, at once too.
    Its tensors lie where the ring lay, so that nothing of them passes through the host on one device.

    Attributes:
        about: what it was made with: version, model and digest, ring, policy, types, backend, device, lanes.
        params: of the request. seed, sample: of its noise. pin: the end of the pinned span.
        inside: whether the prompt ended inside a thought.
        tail: how the prompt ended: "answer" where the model was to speak, else the role of the last message.
        ended: the finish reason of a request that has ended, else "".
        warnings, retained: as of its result.
        passed: places in ``tokens`` at which it had ended, and went on.
        prompt: ids of all that was read before the answer.
        tokens: ids of the answer so far; the ring has read all but the last.
        forced: places in ``tokens`` that the model did not choose.
        logprobs: of the tokens, where the request wanted them.
        lane: what the ring and the steering hold, by name; and ``LOGITS`` where there are no tokens yet.
        more: what is read before it goes on; see ``then``.
        source: the file that it came from.

    >>> import ringkv
    >>> with ringkv.Engine.from_pretrained("smollm2", ring=ringkv.RingConfig(48, 16), dtype="float32") as engine:
    ...     params = ringkv.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ...     half = engine.generate("Name a colour.", params, keep=True).snapshot
    ...     whole = engine.generate("Name a colour.", params.replace(max_tokens=90))
    ...     rest = engine.generate(half, params.replace(max_tokens=90))
    >>> rest.token_ids == whole.token_ids, len(half.tokens)
    (True, 20)
    """

    about: Mapping[str, Any]
    params: SamplingParams
    seed: int
    sample: int
    pin: int
    inside: bool
    tail: str
    ended: str
    warnings: list[str]
    retained: list[int]
    passed: list[int]
    prompt: list[int]
    tokens: list[int]
    forced: list[int]
    logprobs: list[dict[str, Any]]
    lane: Mapping[str, Tensor] = field(repr=False)
    more: More | None = None
    source: str | None = None

    @property
    def unread(self) -> list[int]:
        """The tokens that the ring has not read: the last one, or none where the next one was not drawn yet."""
        return [] if LOGITS in self.lane else self.tokens[-1:]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: the same for every snapshot of a ring, but for ``LOGITS``."""
        return sum(x.nbytes for x in self.lane.values())

    def fork(self, n: int) -> list[Snapshot]:
        """``n`` snapshots that share this one's tensors. The first goes on as it would, the others with the noise of
        the sample indices that follow.

        Raises:
            RingkvError: n is not an int >= 1.
        """
        check_int("fork: n", n, 1, 1 << 16)
        return [dataclasses.replace(self, sample=self.sample + k) for k in range(n)]

    def then(self, more: More) -> Snapshot:
        """The same, with something to be read before it goes on.

        A text is put into the answer as if the model had written it, as token ids are; a token that ended the answer
        gives way to it. Messages are further turns: the answer is over, and the next one begins.

        Raises:
            RingkvError: something is to be read already.
        """
        if self.more is not None:
            raise RingkvError("append: something is to be read already; accepted is all at once, or Engine.read first")
        return dataclasses.replace(self, more=more)

    def save(self, path: str | os.PathLike[str], field: str = "snapshot") -> None:
        """Write a file that only its owner can read; at every moment it is whole, or the one that was there before.

        Args:
            field: what errors call the file.

        Raises:
            RingkvError: it cannot be written, or ``more`` holds what is no JSON.
        """
        tensors = {name: x.cpu().contiguous() for name, x in self.lane.items()}
        for name, ids in zip(_IDS, (self.prompt, self.tokens, self.forced), strict=True):
            tensors[name] = torch.tensor(ids, dtype=torch.int32)
        written = json.dumps(self.logprobs).encode() if self.logprobs else b""
        tensors[_LOGPROBS] = torch.tensor(list(written), dtype=torch.uint8)
        about = self._json()
        data = {name: _bytes(tensors[name]) for name in sorted(tensors)}
        header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "about": about, "crc32": _checksum(about, data)}}
        end = 0
        for name, part in data.items():
            x, start, end = tensors[name], end, end + len(part)
            header[name] = {"dtype": _DTYPES[x.dtype], "shape": [*x.shape], "data_offsets": [start, end]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with replacing(Path(path), field, private=True) as fd:
            write_all(fd, len(head).to_bytes(8, "little") + head)
            for part in data.values():
                write_all(fd, part)
        os.close(fd)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], accept: Callable[[Snapshot], object] = lambda snapshot: None
    ) -> Snapshot:
        """Read a file that ``save`` wrote. Nothing in it is trusted.

        Args:
            accept: called before the tensors are read, with a snapshot whose ``lane`` lies on the meta device: names,
                shapes and types without data. May raise to refuse it.

        Raises:
            RingkvError: the file cannot be read, is torn, or is no snapshot; it names the file and what is wrong.
        """
        kinds = (SafetensorError, ValueError, TypeError, KeyError, RecursionError, RuntimeError, MemoryError)
        with naming(f"snapshot {str(path)!r}", "it is no whole snapshot", kinds):
            if not stat.S_ISREG(os.stat(os.fspath(path)).st_mode):  # a pipe would wait for a writer
                raise RingkvError("it is no regular file; accepted is one that --save or Snapshot.save wrote")
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MOST_HEADER:
                raise RingkvError(f"it is no snapshot of ringkv: a header of {size(length)}")
            with safe_open(path, framework="pt") as parts:
                return cls._read(parts, str(path), accept)

    @classmethod
    def _read(cls, parts: Any, path: str, accept: Callable[[Snapshot], object]) -> Snapshot:
        head = parts.metadata() or {}
        if head.get("format") != FORMAT:
            raise RingkvError.bad("format", head.get("format"), repr(FORMAT))
        fields = _checked(json.loads(head.get("about", "null")))
        shapes = {name: _empty(parts.get_slice(name)) for name in parts.keys()}  # noqa: SIM118 - it is no mapping
        if not {*_IDS, _LOGPROBS} <= shapes.keys() or any(shapes[name].dim() != 1 for name in _IDS):
            raise RingkvError(f"tensors: accepted are {', '.join(_IDS)}, {_LOGPROBS} and a lane")
        prompt, tokens, forced = (parts.get_tensor(name).tolist() for name in _IDS)
        written = parts.get_tensor(_LOGPROBS)
        lane = {name: x for name, x in shapes.items() if name not in (*_IDS, _LOGPROBS)}
        logprobs = json.loads(bytes(written.numpy())) if len(written) else []
        if (
            not isinstance(logprobs, list)
            or len(logprobs) > len(tokens)
            or not all(isinstance(x, dict) for x in logprobs)
        ):
            raise RingkvError(f"{_LOGPROBS}: accepted is a list with an object a token")
        if forced != sorted({*forced}) or not all(0 <= place < len(tokens) for place in forced):
            raise RingkvError("ids.forced: accepted are ascending places in ids.tokens")
        ids = {"prompt": prompt, "tokens": tokens, "forced": forced, "logprobs": logprobs}
        found = cls(**fields, **ids, lane=lane, source=path)
        accept(found)
        data = {name: parts.get_tensor(name) for name in sorted(shapes)}
        if _checksum(head["about"], {name: _bytes(x) for name, x in data.items()}) != head.get("crc32"):
            raise RingkvError("crc32: the file is damaged")
        # Copies: a file that is mapped must not change, and end, under an engine.
        return dataclasses.replace(found, lane={name: data[name].clone() for name in lane})

    def _json(self) -> str:
        params = {name: value for name, value in dataclasses.asdict(self.params).items() if value != _DEFAULTS[name]}
        about = {"version": VERSION, "about": dict(self.about), "params": params, "more": self.more}
        try:
            return json.dumps(about | {name: getattr(self, name) for name in _FIELDS})
        except (TypeError, ValueError) as error:
            raise RingkvError(f"snapshot: what is to be read next is no JSON ({error})") from error


def _checked(about: Any) -> dict[str, Any]:
    """The fields of a snapshot that its JSON holds."""
    if not isinstance(about, dict) or about.get("version") != VERSION:
        version = about.get("version") if isinstance(about, dict) else about
        raise RingkvError.bad("version", version, str(VERSION))
    kinds: dict[str, type] = {"about": dict, "params": dict, **_FIELDS}
    for name, kind in kinds.items():
        value = about.get(name)
        if not isinstance(value, kind) or (kind is int and not is_int(value)):
            raise RingkvError.bad(name, value, f"of the type {kind.__name__}")
    if unknown := sorted(about["params"].keys() - _DEFAULTS.keys()):
        raise RingkvError(f"params: {unknown[0]} is not known")
    for name, accepted in (("tail", _TAILS), ("ended", _ENDINGS)):
        if about[name] not in accepted:
            raise RingkvError.bad(name, about[name], ", ".join(map(repr, accepted)))
    if not all(isinstance(text, str) for text in about["warnings"]):
        raise RingkvError("warnings: accepted are texts")
    for name, values, most in (
        ("seed", [about["seed"]], 2**64 - 1),
        ("sample", [about["sample"]], 2**24 - 1),
        ("pin", [about["pin"]], MOST),
        ("retained", about["retained"], MOST),
        ("passed", about["passed"], MOST),
    ):
        for value in values:
            check_int(name, value, 0, most)
    fields = {name: about[name] for name in ("about", "more", *_FIELDS)}
    return fields | {"params": SamplingParams(**about["params"])}


def _empty(part: Any) -> Tensor:
    """A tensor without data in the shape and the type of one in a file."""
    dtype = next((dtype for dtype, name in _DTYPES.items() if name == part.get_dtype()), None)
    if dtype is None:
        raise RingkvError.bad("tensors: a type", part.get_dtype(), ", ".join(_DTYPES.values()))
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def _bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor on the host, not copied."""
    return x.reshape(-1).view(torch.uint8).numpy().data


def _checksum(about: str, data: Mapping[str, memoryview]) -> str:
    crc = zlib.crc32(about.encode())
    for part in data.values():
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
