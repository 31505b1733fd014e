"""The settings file beside the results of a run: what its tokens depend on, its seed, and the digest of each row.

It is JSON with a line for each row, and is written and read row by row: a run may have a million of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from ringkv.apps.jobs.rows import parse_object
from ringkv.errors import RingkvError, naming
from ringkv.files import replacing

_ROWS = b' "rows": {\n'
_NONE = "it is not the settings of a run"


def write_settings(path: Path, head: Mapping[str, Any], rows: IO[bytes]) -> None:
    """Write the file as a whole: ``json.dumps(..., indent=1)`` of the head and of "rows", an object of digests.

    Args:
        rows: what ``settings_entry`` gives of each.
    """
    with replacing(path) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.write(json.dumps({**head, "rows": {}}, indent=1).encode().removesuffix(b"}\n}"))
        begun = file.tell()
        rows.seek(0)
        shutil.copyfileobj(rows, file)
        file.write(b"}\n}" if file.tell() == begun else b"\n }\n}")
    os.close(fd)


def read_settings(path: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    """What stands before the rows, and each row's key and digest.

    Raises:
        RingkvError: it is not the settings of a run; where a row shows this, when its turn comes.
    """
    with naming(str(path)):
        with path.open("rb") as file:
            head = b"".join(takewhile(lambda line: line != _ROWS, file))
            entries = _entries(path, file.tell())
        try:
            return _head(head + b' "rows": {}}'), entries
        except RingkvError:  # its lines are not as they were written: somebody has formatted it
            theirs = _head(path.read_bytes())
            return theirs, iter(theirs["rows"].items())


def _head(data: bytes) -> dict[str, Any]:
    theirs = parse_object(data)
    kinds = {"settings": dict, "seed": int, "rows": dict}
    if theirs.keys() != kinds.keys() or not all(isinstance(theirs[name], kind) for name, kind in kinds.items()):
        raise RingkvError(_NONE)
    return theirs


def _entries(path: Path, offset: int) -> Iterator[tuple[str, Any]]:
    with naming(str(path)), path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line == b" }\n" and file.read().strip() == b"}":
                return
            yield from parse_object(b"{" + line.strip().removesuffix(b",") + b"}").items()
        raise RingkvError(_NONE)
