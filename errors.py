"""The one exception a caller needs to catch, the checks that raise it, and how a message tells an amount of memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeGuard

MOST = 2**31 - 1  # the last position that a ring can hold


class RingkvError(ValueError):
    """Something the caller can mend: an option, a checkpoint, a prompt.

    The message is one line that names the field, what was given and what is accepted; the command line prints it
    as it is and exits with code 2.
    """

    @classmethod
    def bad(cls, field: str, given: object, accepted: str) -> RingkvError:
        """The error for a value that is not accepted.

        >>> str(RingkvError.bad("window", 0, "an int >= 1"))
        'window = 0: accepted is an int >= 1'
        """
        return cls(f"{field} = {given!r}: accepted is {accepted}")


@contextmanager
def naming(place: str, broken: str = "", kinds: tuple[type[Exception], ...] = ()) -> Generator[None, None, None]:
    """Puts a place before the message of what is refused in the block, be it by a check or by the system.

    Args:
        broken: what an error of one of these kinds, which a library raised, says of the place.
    """
    try:
        yield
    except RingkvError as error:
        told = str(error).removeprefix(f"{place}: ")  # it may know its place itself
        raise RingkvError(f"{place}: {told}") from error
    except OSError as error:
        raise RingkvError(f"{place}: {error.strerror or error}") from error
    except kinds as error:
        raise RingkvError(f"{place}: {broken} ({error})") from error


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(field: str, value: object, least: int, most: int = MOST, *, odd: bool = False, other: str = "") -> None:
    """Refuse what is not an int from ``least`` to ``most``.

    Args:
        field: what the error calls the value.
        odd: even ints are refused too.
        other: what else is accepted, as the error says it.

    Raises:
        RingkvError: naming the field, the value and what is accepted.
    """
    kind = "an odd int" if odd else "an int"
    if not is_int(value) or value < least or (odd and value % 2 == 0):
        raise RingkvError.bad(field, value, f"{kind} >= {least}{other}")
    if value > most:
        raise RingkvError.bad(field, value, f"{kind} <= {most}{other}")


def check_count(field: str, value: object, most: int = MOST) -> None:
    """Refuse what is neither "auto" nor an int from 1 to ``most``."""
    if value != "auto":
        check_int(field, value, 1, most, other=" or 'auto'")


def check_number(field: str, value: object, low: float, high: float) -> None:
    """Refuse what is not a number from ``low`` to ``high``; NaN is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise RingkvError.bad(field, value, f"a number from {low:g} to {high:g}")


def size(count: float) -> str:
    """Bytes for a person: "1.25 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
