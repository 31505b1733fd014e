"""Typed reading of a JSON object, key by key, so that a key nobody read is noticed."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ringkv.errors import RingkvError

# JSON files of a checkpoint are kilobytes, the index of a huge mixture a few megabytes.
_MAX_JSON_BYTES = 64 << 20
_MISSING: Any = object()
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 160


class Keys:
    """The keys of one JSON object, read with a type and a range, each at most what it says it is.

    Every method takes the key and the value that an absent key stands for (none given: the key is required), and
    raises RingkvError, naming the key with its path, for a value of another type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise refusal(path.rstrip(".") or "config.json", values, "a JSON object")
        self._values, self._path = values, path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and says something: null is as good as absent."""
        return self._values.get(key) is not None

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise RingkvError(f"{self._path}{key} is missing from the configuration")
        return value

    def integer(self, key: str, default: Any = _MISSING, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.raw(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an int from {low} to {high}")
        return value

    def number(self, key: str, default: Any = _MISSING, low: float = 0.0, above: bool = True) -> float:
        """A finite number above ``low``, or from it on where ``above`` is False, that float32 can hold."""
        value = self.raw(key, default)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:
            raise self.refuse(key, "a finite number")
        if value < low or (above and value == low):
            raise self.refuse(key, f"a number {'above' if above else 'of at least'} {low:g}")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, accepted: Collection[Any], default: Any = _MISSING) -> Any:
        """One of ``accepted``, compared with its type: 1 is not true."""
        value = self.raw(key, default)
        if not any(type(value) is type(one) and value == one for one in accepted):
            raise self.refuse(key, " or ".join(json.dumps(one) for one in accepted))
        return value

    def integers(self, key: str, default: Any = _MISSING, high: int = 2**31 - 1) -> tuple[int, ...]:
        """A list of ints from 0 to ``high``."""
        value = self.raw(key, default)
        fits = isinstance(value, list | tuple) and all(type(one) is int and 0 <= one <= high for one in value)
        if not fits:
            raise self.refuse(key, f"a list of ints from 0 to {high}")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; none where the key is absent or null."""
        value = self.raw(key, None)
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise self.refuse(key, f"an int from 0 to {2**31 - 1}, or a list of them")
        return tuple(ids)

    def object(self, key: str) -> Keys:
        """A nested object; absent and null read as an empty one."""
        value = self.raw(key, None)
        return Keys({} if value is None else value, f"{self._path}{key}.")

    def skip(self, keys: Iterable[str]) -> None:
        """These keys change nothing."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse what nobody read; null switches nothing on, so it may stay."""
        for key, value in self._values.items():
            if key not in self._read and value is not None:
                name = key if key.isprintable() and len(key) < 80 else short(key)
                raise RingkvError(f"{self._path}{name} = {short(value)}: this key is not supported")

    def refuse(self, key: str, accepted: str) -> RingkvError:
        given = short(self._values[key]) if key in self._values else "absent"
        return RingkvError(f"{self._path}{key} = {given}: accepted is {accepted}")


def refusal(field: str, given: object, accepted: str) -> RingkvError:
    """RingkvError.bad for values that come from a file and may be of any size."""
    return RingkvError(f"{field} = {short(given)}: accepted is {accepted}")


def short(value: object) -> str:
    """A value from a file, fit for one line."""
    return _REPR.repr(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RingkvError: the file cannot be read, is not UTF-8 JSON, or holds something else than an object.
    """
    try:
        if not path.is_file():
            raise RingkvError(f"{path}: there is no such file")
        if (size := os.path.getsize(path)) > _MAX_JSON_BYTES:
            raise RingkvError(f"{path}: {size} bytes are too many for a JSON file of a checkpoint")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except RingkvError:
        raise
    except OSError as error:
        raise RingkvError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RingkvError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise RingkvError(f"{path}: holds {short(value)} instead of a JSON object")
    return value
