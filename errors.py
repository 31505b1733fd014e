"""The one exception a caller needs to catch, and how its message tells an amount of memory."""

from __future__ import annotations


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


def size(count: float) -> str:
    """Bytes for a person: "1.25 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
