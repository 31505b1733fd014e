"""Files of snapshots that nobody should trust: taken apart, changed, and put together with the right checksum."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Parts = tuple[dict[str, Any], dict[str, Tensor]]


def take_apart(path: Path) -> Parts:
    """The JSON of a file, and its tensors."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        return about, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def put_together(path: Path, about: Any, tensors: dict[str, Tensor], crc: str | None = None, **head: str) -> None:
    """A file of them whose checksum is right unless one is given."""
    text = json.dumps(about)
    if crc is None:
        check = zlib.crc32(text.encode())
        for name in sorted(tensors):
            check = zlib.crc32(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), check)
        crc = f"{check:08x}"
    metadata = {"format": "ringkv snapshot", "about": text, "crc32": crc, **head}
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata)


def forge(data: bytes, path: Path, parts: Callable[[], Parts], rng: random.Random) -> None:
    """Write the file that ``data`` is, with something changed."""
    kind = rng.randrange(5)
    if kind == 0:  # bytes of the header, or any
        changed = bytearray(data)
        end = min(len(data), 8 + int.from_bytes(data[:8], "little")) if rng.random() < 0.7 else len(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(end)] = rng.randrange(256)
        path.write_bytes(changed)
        return
    if kind == 1:  # torn, or longer
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.8 else data + bytes(rng.randrange(1, 99)))
        return
    about, tensors = parts()
    if kind == 2:  # a value of the JSON
        place: Any = about if rng.random() < 0.5 else about[rng.choice(("about", "params"))]
        name = rng.choice([*place, "unknown"])
        place[name] = rng.choice((None, -1, 0, 1, 2**70, 1.5, "", "x" * 9, [], [7], {}, {"a": 1}, True, "vase-attnv"))
    else:
        name = rng.choice([*tensors])
        x = tensors[name]
        if kind == 3 and x.numel():  # numbers of a table
            flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
            for _ in range(rng.choice((1, 1, 5))):
                value = rng.choice((-1, 0, 1, 2, 7, 31, 32, 96, 97, 255, 10**5, -(2**31)))
                flat[rng.randrange(len(flat))] = value if x.dtype != torch.uint8 else value % 256
            tensors[name] = flat.view(x.shape)
        elif rng.random() < 0.3:
            del tensors[name]
        else:  # its shape or its type
            tensors[name] = rng.choice(
                (x.reshape(-1)[:-1], x[None], x.double(), x.long(), x.repeat(2) if x.dim() < 2 else x)
            )
    put_together(path, about, tensors)
