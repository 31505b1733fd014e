"""A checkpoint in a folder: config.json, safetensors in one file or in shards with an index, and a tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ringkv.errors import RingkvError
from ringkv.models.checkpoints.fp8 import SCALE, block_size, dequantize
from ringkv.models.keys import read_json, short
from ringkv.models.special_tokens import optional_json
from ringkv.models.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of any script, but in no other folder, and no pattern of several names.
_SHARD_NAME = re.compile(r"[^./\\*?[\]][^/\\*?[\]]*\.safetensors")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FP8 = "F8_E4M3"
# Bytes of a file that are read at a time, and after which its mapping is dropped: pages of a mapping count as
# resident, and would add a whole shard to the peak of a load.
_BLOCK_BYTES, _MAPPED_BYTES = 8 << 20, 32 << 20


@dataclass(frozen=True)
class _Entry:
    """What a shard's header says of a tensor."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (1 if self.dtype == _FP8 else getattr(torch, _DTYPES[self.dtype]).itemsize)


class SafetensorsCheckpoint:
    """See Checkpoint. Opening one reads and compares all headers, no tensor; pickle files are never opened.

    Args:
        folder: holds everything; a name in the index that leaves it is refused.
        name: what a person calls it; default the folder's path.
        alone: whether weights that are not part of the checkpoint are refused.

    Raises:
        RingkvError: a file is missing, cut short, damaged or superfluous, or index and shards disagree.
    """

    def __init__(self, folder: Path, name: str | None = None, *, alone: bool = True) -> None:
        self.folder, self.name = folder, name or str(folder)
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        self.generation_config: Mapping[str, Any] = optional_json(folder / "generation_config.json")
        self._block = block_size(self.config.get("quantization_config"))
        self._entries = _read_headers(folder, alone)
        self._scales = self._check_dtypes()
        self._open: tuple[Path, Any] | None = None
        self._mapped = 0
        if not (self.config.get("dtype") or self.config.get("torch_dtype")):
            self.config = {**self.config, "dtype": self._stored_dtype()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # The scales of FP8 weights belong to their weights.
        return {name: entry.shape for name, entry in self._entries.items() if name not in self._scales}

    def read(self, name: str, out: Tensor) -> None:
        entry = self._entries[name]
        assert tuple(out.shape) == entry.shape, name
        if not entry.shape or 0 in entry.shape:
            out.copy_(self._part(entry, name))
            return
        scale = None
        if entry.dtype == _FP8:
            scale = self._part(self._entries[name + SCALE], name + SCALE).clone()
        rows = max(1, _BLOCK_BYTES * entry.shape[0] // entry.nbytes)
        for start in range(0, entry.shape[0], rows):
            part = self._part(entry, name, slice(start, start + rows))
            if scale is not None and self._block is not None:
                part = dequantize(part, scale, self._block, start)
            out[start : start + rows].copy_(part)

    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.folder)

    def _part(self, entry: _Entry, name: str, rows: slice | None = None) -> Tensor:
        """Rows of a tensor, as stored; a view of the mapped file, not to be kept."""
        if self._open is None or self._open[0] != entry.shard or self._mapped > _MAPPED_BYTES:
            self._open, self._mapped = (entry.shard, _open(entry.shard)), 0
        file = self._open[1]
        try:
            part: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise _damaged(entry.shard, error) from error
        self._mapped += part.nbytes
        return part

    def _check_dtypes(self) -> set[str]:
        """Refuse what is not a float; return the names of the scales."""
        scales = {name + SCALE for name, entry in self._entries.items() if entry.dtype == _FP8}
        for name, entry in self._entries.items():
            if entry.dtype == _FP8:
                self._check_scale(name, entry)
            elif entry.dtype not in _DTYPES:
                raise RingkvError(
                    f"{entry.shard}: tensor {short(name)} is {entry.dtype}: accepted is {', '.join(_DTYPES)}, and "
                    f"{_FP8} with quantization_config.weight_block_size"
                )
            elif self._block is not None and name.endswith(SCALE) and name not in scales:
                raise RingkvError(f"{entry.shard}: tensor {short(name)} is the scale of no FP8 weight")
        return scales

    def _check_scale(self, name: str, entry: _Entry) -> None:
        scale = self._entries.get(name + SCALE)
        if self._block is None:
            raise RingkvError(
                f"{entry.shard}: tensor {short(name)} is {_FP8}, but config.json has no quantization_config"
            )
        if scale is None:
            raise RingkvError(f"{entry.shard}: tensor {short(name)} is {_FP8} without a tensor {short(name + SCALE)}")
        wanted = tuple(-(-size // block) for size, block in zip(entry.shape, self._block, strict=False))
        if len(entry.shape) != 2 or scale.shape != wanted or scale.dtype not in _DTYPES:
            raise RingkvError(
                f"{scale.shard}: tensor {short(name + SCALE)} is {scale.dtype} {list(scale.shape)}: accepted is a "
                f"float {list(wanted)} for a weight {list(entry.shape)} in blocks of {list(self._block)}"
            )

    def _stored_dtype(self) -> str:
        """The type that holds most bytes, for a config.json that does not say."""
        bytes_of = dict.fromkeys(_DTYPES, 0)
        for entry in self._entries.values():
            bytes_of["BF16" if entry.dtype == _FP8 else entry.dtype] += entry.nbytes
        return _DTYPES[max(bytes_of, key=lambda dtype: bytes_of[dtype])]


def _read_headers(folder: Path, alone: bool) -> dict[str, _Entry]:
    """Every tensor of the folder's shards, checked against the index if there is one."""
    present = {path.name for path in folder.glob("*.safetensors")}
    if INDEX in {path.name for path in folder.glob("*.json")}:
        index = read_index(folder / INDEX)
        shards = sorted(set(index.values()))
    else:
        index, shards = None, [SINGLE]
        if SINGLE not in present:
            pickles = sorted(path.name for path in folder.glob("*.bin"))[:1]
            found = f" (found {pickles[0]}: pickle files are never opened)" if pickles else ""
            raise RingkvError(f"{folder}: holds neither {SINGLE} nor {INDEX}{found}")
    # Mistral's repositories hold the weights a second time, under its own names.
    for name in sorted(present - set(shards)):
        if alone and not name.startswith("consolidated"):
            source = INDEX if index is not None else f"one {SINGLE}"
            raise RingkvError(f"{folder / name}: is not part of the checkpoint, which is {source}")
    entries: dict[str, _Entry] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise RingkvError(f"{folder / shard}: this shard is missing; {INDEX} names it")
        for name, entry in _read_header(folder / shard).items():
            if index is not None and index.get(name) != shard:
                says = f"puts it into {index[name]}" if name in index else "does not name it"
                raise RingkvError(f"{folder / shard}: holds tensor {short(name)}, but {INDEX} {says}")
            entries[name] = entry
    for name, shard in (index or {}).items():
        if name not in entries:
            raise RingkvError(f"{folder / shard}: tensor {short(name)} is missing; {INDEX} puts it there")
    return entries


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard name."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise RingkvError(f"{path}: weight_map = {short(index)}: accepted is an object of tensor and shard names")
    for shard in index.values():
        named = isinstance(shard, str) and shard.isprintable() and _SHARD_NAME.fullmatch(shard)
        if not named or len(shard.encode()) > 255:
            raise RingkvError(f"{path}: shard {short(shard)}: accepted is a *.safetensors name in the same folder")
    return index


def _read_header(shard: Path) -> dict[str, _Entry]:
    file = _open(shard)
    if (layout := (file.metadata() or {}).get("format", "pt")) not in ("pt", "mlx"):
        raise RingkvError(f"{shard}: the header's format is {short(layout)}: accepted is pt")
    headers = {name: file.get_slice(name) for name in file.offset_keys()}
    return {name: _Entry(shard, tuple(each.get_shape()), str(each.get_dtype())) for name, each in headers.items()}


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(shard, error) from error


def _damaged(shard: Path, error: Exception) -> RingkvError:
    return RingkvError(f"{shard}: damaged, cut short or not safetensors: {' '.join(str(error).split())}")
