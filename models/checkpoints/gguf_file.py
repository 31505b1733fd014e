"""The GGUF container: its metadata and where each tensor lies, with every length checked against the file.

The reader of the gguf package keeps a numpy view for every string of the vocabulary (1.6 s and 150 MiB for
SmolLM2) and loops for ever on some broken files; its tables of types and its dequantisation are used.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ringkv.errors import RingkvError
from ringkv.models.keys import short

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# Far above any real file, far below what would keep a broken one busy.
_MAX_COUNT = 1 << 24
_MAX_DIMS = 4
_MAX_HEADER = 64 << 20  # bytes; a large vocabulary with its merges takes twenty million


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. ``shape`` is in torch's order, the rows of the last dimension are ``row_bytes`` long."""

    name: str
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    row_bytes: int

    def bytes_of(self, count: int) -> int:
        """The bytes that ``count`` numbers, whole blocks of them, take in the file."""
        return count * self.row_bytes // self.shape[-1]


class GGUFFile(NamedTuple):
    """What the header of a GGUF file says."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def gguf_package() -> Any:
    """The gguf package, which is optional.

    Raises:
        RingkvError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise RingkvError("reading a .gguf file needs the gguf package: pip install 'ringkv[gguf]'") from error
    return gguf


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, version 2 or 3, little-endian.

    Raises:
        RingkvError: the file cannot be read, is not GGUF, is cut short or contradicts itself, or the gguf package
            is missing.
    """
    gguf = gguf_package()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), min(size, _MAX_HEADER), access=mmap.ACCESS_READ) as data:
                return _Header(path, data, size, gguf).read()
    except OSError as error:
        raise RingkvError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error) as error:
        if isinstance(error, RingkvError):
            raise
        if isinstance(error, UnicodeDecodeError):
            raise RingkvError(f"{path}: broken GGUF file: a string that is not UTF-8") from error
        raise RingkvError(
            f"{path}: broken GGUF file: it ends inside its header"
            + (f", which is longer than {_MAX_HEADER} bytes" if size > _MAX_HEADER else "")
        ) from error


class _Header:
    """One pass over the header; reading past the end raises struct.error."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, gguf: Any) -> None:
        self.path, self.data, self.size, self.at, self.gguf = path, data, size, 0, gguf

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise self.broken("it does not start with GGUF")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise RingkvError(
                f"{self.path}: GGUF version = {'big-endian' if swapped else version}: accepted is little-endian 2 or 3"
            )
        tensors, pairs = self.count("Q"), self.count("Q")
        file = GGUFFile({}, {})
        for _ in range(pairs):
            (key,) = self.strings(1)
            if key in file.metadata:
                raise self.broken(f"it holds {short(key)} twice")
            file.metadata[key] = self.value(self.scalar("I"), key)
        infos = [self.info() for _ in range(tensors)]
        alignment = file.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise RingkvError.bad(f"{self.path}: general.alignment", alignment, "a power of two")
        start = -(-self.at // alignment) * alignment
        for name, dims, kind, offset in infos:
            if name in file.tensors:
                raise self.broken(f"it holds the tensor {short(name)} twice")
            file.tensors[name] = self.tensor(name, dims, kind, start + offset)
        for one, other in pairwise(sorted(file.tensors.values(), key=lambda tensor: tensor.offset)):
            if one.offset + one.bytes_of(math.prod(one.shape)) > other.offset:
                raise self.broken(f"the tensors {short(one.name)} and {short(other.name)} overlap")
        return file

    def scalar(self, code: str) -> Any:
        return self.scalars(code)[0]

    def scalars(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return values

    def count(self, code: str, at_most: int = _MAX_COUNT) -> int:
        value: int = self.scalar(code)
        if value > at_most:
            raise self.broken(f"it counts {value} of something")
        return value

    def strings(self, count: int) -> list[str]:
        """The loop of the reader: a vocabulary and its merges are some hundred thousand strings."""
        data, size, at, length_at = self.data, len(self.data), self.at, _LENGTH.unpack_from
        found = []
        for _ in range(count):
            (length,) = length_at(data, at)
            end = at + 8 + length
            if end > size:
                raise struct.error
            found.append(data[at + 8 : end].decode())
            at = end
        self.at = at
        return found

    def value(self, kind: int, key: str) -> Any:
        array, count = kind == _ARRAY, 1
        if array:
            kind, count = self.scalar("I"), self.count("Q")
        if kind != _STRING and kind not in _SCALARS:
            raise self.broken(f"{short(key)} is {'an array ' if array else ''}of the unknown type {kind}")
        values = self.strings(count) if kind == _STRING else list(self.scalars(f"{count}{_SCALARS[kind]}"))
        return values if array else values[0]

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        (name,) = self.strings(1)
        dims = tuple(self.scalar("Q") for _ in range(self.count("I", _MAX_DIMS)))
        return name, dims, self.scalar("I"), self.scalar("Q")

    def tensor(self, name: str, dims: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        try:
            kind = self.gguf.GGMLQuantizationType(number)
        except ValueError:
            raise RingkvError(f"{self.path}: tensor {short(name)} has the unknown GGML type {number}") from None
        block, block_bytes = self.gguf.GGML_QUANT_SIZES[kind]
        if not dims or 0 in dims or dims[0] % block:
            raise self.broken(f"{short(name)}, of {kind.name}, has the dimensions {list(dims)}")
        row_bytes = dims[0] // block * block_bytes
        end = offset + math.prod(dims[1:]) * row_bytes
        if end > self.size:
            raise RingkvError(
                f"{self.path}: cut short: tensor {short(name)} ends at byte {end}, the file at {self.size}"
            )
        return GGUFTensor(name, kind, dims[::-1], offset, row_bytes)

    def broken(self, what: str) -> RingkvError:
        return RingkvError(f"{self.path}: broken GGUF file: {what}")
