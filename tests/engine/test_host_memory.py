"""Free memory where limits hold: files as the kernel writes them, in a root of their own; a process with a limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringkv.engine.host_memory import available_bytes, free_memory

GIB, MIB = 1 << 30, 1 << 20
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)
HYBRID_MOUNTS = V1_MOUNTS + "\n34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
STAT_V2 = "anon 4096\nfile 999\nactive_file {active}\ninactive_file {inactive}\n"
# The first lines are of the group alone, the last of all that it holds.
STAT_V1 = "cache 1\nactive_file 1\ninactive_file 1\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n"


@pytest.fixture(autouse=True)
def _no_limits_here(monkeypatch):
    """The machine on which the tests run may have limits of its own."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Root:
    """A root with 16 GiB that are available, and what is written into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("proc/meminfo", f"MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   {16 << 20} kB\n")

    def write(self, name: str, text: object) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}".rstrip("\n") + "\n")

    def group(self, name: str, **files: object) -> None:
        """Files of a control group, with the dots of their names as underscores."""
        for file, text in files.items():
            self.write(f"sys/fs/cgroup/{name}/{file.replace('memory_', 'memory.', 1)}", text)

    @property
    def free(self) -> int | None:
        return available_bytes(self.path)


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path)


def test_without_limits_it_is_what_is_available(root):
    assert root.free == 16 * GIB


def test_a_system_that_does_not_say_has_what_is_built_in(tmp_path):
    assert available_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


V2 = {"memory_max": 8 * GIB, "memory_current": 3 * GIB}


@pytest.mark.parametrize(
    "groups, free",
    [
        ({"user/me": V2}, 5 * GIB),
        ({"user/me": V2 | {"memory_max": "max"}}, 16 * GIB),
        ({"user/me": V2 | {"memory_max": 64 * GIB}}, 16 * GIB),
        ({"user/me": V2 | {"memory_high": 4 * GIB}}, 1 * GIB),
        ({"user/me": V2 | {"memory_high": "max"}}, 5 * GIB),
        ({"user/me": {"memory_max": "max", "memory_current": GIB}, "user": V2}, 5 * GIB),
        ({"user/me": V2, "user": V2 | {"memory_current": 7 * GIB}}, 1 * GIB),
        ({"user/me": V2, ".": {"memory_max": 4 * GIB, "memory_current": 2 * GIB}}, 2 * GIB),
        ({"user/me": V2, "user/other": V2 | {"memory_current": 7 * GIB}}, 5 * GIB),
        ({"user/me": V2 | {"memory_current": 9 * GIB}}, 0),
        ({"user/me": V2 | {"memory_stat": STAT_V2.format(active=GIB, inactive=GIB // 2)}}, 6 * GIB + GIB // 2),
        ({"user/me": V2 | {"memory_stat": STAT_V2.format(active=4 * GIB, inactive=0)}}, 8 * GIB),
    ],
)  # fmt: skip
def test_control_groups_of_version_2(root, groups, free):
    """Oracle: limit - (use - cache), the least of this group and of those that it is in; by hand."""
    root.write("proc/self/cgroup", "0::/user/me")
    root.write("proc/self/mountinfo", V2_MOUNT.format(top="/"))
    for name, files in groups.items():
        root.group(name, **files)
    assert root.free == free


V1 = {"memory_limit_in_bytes": 8 * GIB, "memory_usage_in_bytes": 3 * GIB}
UNLIMITED = {"memory_limit_in_bytes": 9223372036854771712, "memory_usage_in_bytes": 3 * GIB}


@pytest.mark.parametrize("mounts", [V1_MOUNTS, HYBRID_MOUNTS])
@pytest.mark.parametrize(
    "groups, free",
    [
        ({"docker/1": V1}, 5 * GIB),
        ({"docker/1": UNLIMITED}, 16 * GIB),
        ({"docker/1": UNLIMITED, "docker": V1}, 5 * GIB),
        ({"docker/1": V1 | {"memory_stat": STAT_V1.format(active=MIB, inactive=2 * MIB)}}, 5 * GIB + 3 * MIB),
    ],
)
def test_control_groups_of_version_1(root, mounts, groups, free):
    root.write("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/1\n1:name=systemd:/init\n0::/")
    root.write("proc/self/mountinfo", mounts.format(top="/"))
    root.group("unified", cgroup_controllers="")
    for name, files in groups.items():
        root.group(f"memory/{name}", **files)
    assert root.free == free


@pytest.mark.parametrize("inside", ["", "/job"])
def test_a_container_sees_its_own_group_at_the_mount(root, inside):
    """Without a namespace the process is told its path outside, and the mount says which part of that it shows."""
    root.write("proc/self/cgroup", f"4:memory:/docker/1{inside}")
    root.write("proc/self/mountinfo", V1_MOUNTS.format(top="/docker/1"))
    root.group(f"memory{inside}", **V1)
    assert root.free == 5 * GIB


@pytest.mark.parametrize("source", ["- cgroup2 cgroup2 ", "- cgroup2  "])
def test_a_mount_whose_name_has_a_space_or_whose_source_has_none(root, source):
    root.write("proc/self/cgroup", "0::/me")
    mount = V2_MOUNT.format(top="/").replace("/cgroup rw", "/cgroup/two\\040words rw")
    root.write("proc/self/mountinfo", mount.replace("- cgroup2 cgroup2 ", source))
    root.group("two words/me", **V2)
    assert root.free == 5 * GIB


@pytest.mark.parametrize("name, limit", [("VmSize", "RLIMIT_AS"), ("VmData", "RLIMIT_DATA")])
def test_limits_of_the_process(root, monkeypatch, name, limit):
    root.write("proc/self/status", f"Name:\tpython 3 kB\n{name}:\t  {3 << 20} kB\nThreads:\t1")
    infinite = resource.RLIM_INFINITY
    given = {getattr(resource, limit): (5 * GIB, infinite)}
    monkeypatch.setattr(resource, "getrlimit", lambda one: given.get(one, (infinite, infinite)))
    assert root.free == 2 * GIB


LIMITED = """
import resource, sys
import torch
from ringkv import Engine, RingConfig, RingkvError, SamplingParams
from ringkv.engine import free_memory, memory
memory.MOST_BUDGET = 1 << 24
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize:"))
room = 1 << 30
resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
free = free_memory(torch.device("cpu"))
assert room - (32 << 20) < free <= room, free
try:
    Engine.from_pretrained(sys.argv[1], ring=RingConfig(10**7), threads=1)
except RingkvError as error:
    assert str(error).startswith("memory: "), error
else:
    raise AssertionError("what does not fit was not refused")
with Engine.from_pretrained(sys.argv[1], ring=RingConfig("auto"), threads=1) as engine:
    assert room // 4 < engine.ring.nbytes < room
    print(engine.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).completion_tokens)
"""


def test_a_process_with_a_limit_chooses_and_refuses_by_it(tiny_checkpoint):
    """Oracle: the kernel, which gives no more than RLIMIT_AS: what "auto" chose is then really taken."""
    folder = tiny_checkpoint("llama")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(folder)], capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_a_gpu_says_it_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    assert free_memory(torch.device("cuda")) == 7
