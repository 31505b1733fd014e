"""Objects named by a short text: ``"refreekv:threshold=0.05"`` -> ``ReFreeKV(threshold=0.05)``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ringkv.errors import RingkvError

T = TypeVar("T")


def parse_spec(kind: str, text: str, table: Mapping[str, type[T]]) -> T:
    """Build the dataclass that ``text`` names, with the fields it sets.

    Args:
        kind: what is being named ("policy", "retention"), for messages.
        text: ``name`` or ``name:field=value,field=value``.
        table: name -> frozen dataclass.

    Raises:
        RingkvError: an unknown name or field, or a value that is not of the field's type, with the valid ones.
    """
    name, _, fields = text.partition(":")
    if name not in table:
        raise RingkvError.bad(kind, name, ", ".join(table))
    return build(f"{kind} {name}", table[name], fields)


def build(what: str, cls: type[T], text: str) -> T:
    """Build a dataclass from the fields that ``text`` sets, ``field=value,field=value``; it may be empty.

    Args:
        what: is being built, for messages.

    Raises:
        RingkvError: an unknown field, one that is given twice or is missing, or a value that is not of its type.
    """
    types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in fields:
            raise RingkvError.bad(what, item, ", ".join(f"{known}=..." for known in fields) or "no field at all")
        if name in given:
            raise RingkvError(f"{what}: {name} is given twice")
        given[name] = _value(f"{what}: {name}", value, types[name])
    for name, field in fields.items():
        if name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise RingkvError(f"{what}: {name} is missing; accepted is {name}=...")
    return cls(**given)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a policy or retention, by name; none for an object that is no dataclass."""
    if not dataclasses.is_dataclass(value):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def describe(value: Any) -> str:
    """The text that ``parse_spec`` reads back: the name, then every field of the object."""
    fields = ",".join(f"{name}={given}" for name, given in fields_of(value).items())
    return f"{value.name}:{fields}" if fields else value.name


def _value(field: str, text: str, kind: Any) -> Any:
    allowed = typing.get_args(kind) or (kind,)
    if text.lower() == "none" and type(None) in allowed:
        return None
    if bool in allowed and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in allowed:
            try:
                return number(text)
            except ValueError:
                continue
    if str in allowed:
        return text
    names = " or ".join(getattr(each, "__name__", str(each)).replace("NoneType", "none") for each in allowed)
    raise RingkvError.bad(field, text, names)
