"""The memory that this process may still take."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

# Of a control group: the files with its limits and its use, and what of its use is cache that gives way. The kernel's
# Documentation/admin-guide: cgroup-v2.rst, and cgroup-v1/memory.rst.
_V2 = (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be taken on a device without pushing anything out; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of the host that this process may still take; None where the system does not tell.

    That is the least of what the system has, what is left under the limits of each control group that the process is
    in (of either version), and what RLIMIT_AS and RLIMIT_DATA leave.

    Args:
        root: where ``proc`` and the control groups are mounted.
    """
    rooms = [*_system(root), *_control_groups(root), *_process_limits(root)]
    return max(0, min(rooms)) if rooms else None


def _system(root: Path) -> Iterator[int]:
    available = _figures(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield available
        return
    with suppress(AttributeError, ValueError, OSError):  # not Linux: all there is
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _process_limits(root: Path) -> Iterator[int]:
    try:
        import resource
    except ImportError:  # Windows
        return
    used = _figures(root / "proc/self/status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - used.get(name, 0)


def _control_groups(root: Path) -> Iterator[int]:
    """What is left under each limit, from the group of this process up to the one that is mounted."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        groups["v2" if not controllers else "v1" if "memory" in controllers.split(",") else controllers] = group
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, about = line.partition(" - ")
        kind, *_, options = about.split()  # between them stands a source, which may be empty
        version = {"cgroup2": "v2", "cgroup": "v1" if "memory" in options.split(",") else ""}.get(kind, "")
        if version not in groups:
            continue
        top, place = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), part) for part in mount.split()[3:5])
        # A container sees its own group at the mount, whatever that is called outside.
        inside = groups[version].removeprefix(top.rstrip("/")).strip("/")
        base = root / place.strip("/")
        for folder in (base / inside, *(base / inside).parents):
            yield from _left(folder, *(_V2 if version == "v2" else _V1))
            if folder == base:
                break


def _left(folder: Path, limits: tuple[str, ...], use: str, cache: tuple[str, ...]) -> Iterator[int]:
    figures = _figures(folder / "memory.stat")
    for used in _lines(folder / use):
        held = int(used) - sum(figures.get(name, 0) for name in cache)
        for limit in (line for name in limits for line in _lines(folder / name)):
            if limit.isdigit():  # not "max"
                yield int(limit) - max(0, held)


def _figures(path: Path) -> dict[str, int]:
    """Bytes by name, of lines such as ``MemFree: 12 kB`` and ``anon 12288``; none where there is no such file."""
    rows = [line.split() for line in _lines(path)]
    return {
        name.rstrip(":"): int(number) << (10 if unit else 0)
        for name, number, *unit in (row for row in rows if len(row) in (2, 3))
        if number.isdigit()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
