"""Typed reading of a JSON object, key by key, which notices a key that was never read."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ringkv.errors import RingkvError

# The files beside the weights take kilobytes, and a large tokenizer forty megabytes.
_MAX_BYTES = 64 << 20
_MISSING: Any = object()
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 160


class Keys:
    """The keys of one JSON object, each read with a type and a range.

    The methods that read take a key and a default for an absent one; without a default the key is required. They raise
    RingkvError, which names the key with its path, for a value of another type or out of range.

    Args:
        values: the object.
        path: what stands before each key in a message, such as ``"rope_scaling."``.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise refusal(path.rstrip(".") or "config.json", values, "a JSON object")
        self._values, self._path = values, path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value as it is."""
        self._read.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise RingkvError(f"{self._path}{key} is missing from the configuration")
        return value

    def integer(self, key: str, default: Any = _MISSING, low: int = 1, high: int = 2**31 - 1) -> int:
        """An int from ``low`` to ``high``."""
        value = self.raw(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an int from {low} to {high}")
        return value

    def number(self, key: str, default: Any = _MISSING, low: float = 0.0, above: bool = True) -> float:
        """A number that float32 can hold, above ``low``, or at least ``low`` if ``above`` is False."""
        value = self.raw(key, default)
        if type(value) not in (int, float) or not -1e30 < value < 1e30:
            raise self.refuse(key, "a finite number")
        if value < low or (above and value == low):
            raise self.refuse(key, f"a number {'above' if above else 'of at least'} {low:g}")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, accepted: Collection[Any], default: Any = _MISSING) -> Any:
        """One of ``accepted``. Types are compared too: 1 is not true."""
        value = self.raw(key, default)
        if not any(type(value) is type(one) and value == one for one in accepted):
            raise self.refuse(key, " or ".join(json.dumps(one) for one in accepted))
        return value

    def integers(self, key: str, default: Any = _MISSING, high: int = 2**31 - 1) -> tuple[int, ...]:
        """A list of ints from 0 to ``high``, as a tuple."""
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
        """A nested object; an absent or null one is empty."""
        value = self.raw(key, None)
        return Keys({} if value is None else value, f"{self._path}{key}.")

    def skip(self, keys: Iterable[str]) -> None:
        """Count these keys as read, because they change nothing."""
        self._read.update(keys)

    def finish(self, harmless: Iterable[str] = (), fixed: Mapping[str, Collection[Any]] | None = None) -> None:
        """Refuse a key that was not read, unless it is null, which switches nothing on.

        Args:
            harmless: keys that change nothing.
            fixed: keys that may be there with these values only.
        """
        self.skip(harmless)
        for key, accepted in (fixed or {}).items():
            if key in self:
                self.choice(key, accepted)
        for key, value in self._values.items():
            if key not in self._read and value is not None:
                name = key if key.isprintable() and len(key) < 80 else short(key)
                raise RingkvError(f"{self._path}{name} = {short(value)}: this key is not supported")

    def refuse(self, key: str, accepted: str) -> RingkvError:
        """The error for the value of a key."""
        given = short(self._values[key]) if key in self._values else "absent"
        return RingkvError(f"{self._path}{key} = {given}: accepted is {accepted}")


def refusal(field: str, given: object, accepted: str) -> RingkvError:
    """As ``RingkvError.bad``, for a value from a file, which may be of any size."""
    return RingkvError(f"{field} = {short(given)}: accepted is {accepted}")


def short(value: object) -> str:
    """The repr of a value from a file, shortened to fit one line."""
    return _REPR.repr(value).replace("\n", " ")  # of a tensor


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RingkvError: the file cannot be read, is not JSON in UTF-8, or does not hold an object.
    """
    data = read_bytes(path)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RingkvError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise RingkvError(f"{path}: holds {short(value)} instead of a JSON object")
    return value


def read_bytes(path: Path) -> bytes:
    """What a file beside the weights holds.

    Raises:
        RingkvError: it cannot be read, or is too large for one: its size is looked at first.
    """
    try:
        if not path.is_file():
            raise RingkvError(f"{path}: there is no such file")
        if (size := os.path.getsize(path)) > _MAX_BYTES:
            raise RingkvError(f"{path}: holds {size} bytes: accepted is a file of up to {_MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise RingkvError(f"{path}: cannot be read: {error.strerror or error}") from error
