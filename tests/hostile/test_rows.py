"""Files of prompts that are large or odd, in a process with limits of time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"

CHILD = """
import json, os, resource, sys
from pathlib import Path
sys.path.insert(0, HELPERS)
from job_runs import PARAMS, SETTINGS, at_once
from ringkv import RingkvError, SamplingParams
from ringkv.apps.jobs.job import Job
from ringkv.apps.jobs.rows import Row

ROWS = {rows}

def limited(memory):
    held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + memory, resource.RLIM_INFINITY))

class Stop(Exception):
    pass

def ending(count):
    def on_result(status):
        if status.done >= count:
            raise Stop
    return on_result

resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
os.fsync = lambda fd: None  # this is not about the disk
SCRIPT
"""

# A million rows take as many seconds as these take hundredths, and 50 times the memory.
MANY = """
with open("in.jsonl", "w") as file:
    for at in range(ROWS):
        row = {"id": f"row {at}", "prompt": "a word " * 100, "params": {"top_k": 5, "seed": at}}
        file.write(json.dumps(row) + "\\n")
limited(16 << 20)
prepared = []
sampling = Row.sampling
Row.sampling = lambda row, *given: prepared.append(row.line) or sampling(row, *given)
for upto in (1, ROWS // 2, ROWS // 2 + 1):
    del prepared[:]
    with Job("in.jsonl", "out.jsonl", PARAMS, SETTINGS) as job:
        before = job.status.done
        try:
            job.run(at_once, ending(upto))
        except Stop:
            pass
        assert (job.status.done, job.missing, len(prepared)) == (upto, ROWS - upto, upto - before)
ids = [json.loads(line)["id"] for line in open("out.jsonl")]
assert ids == [f"row {at}" for at in range(ROWS // 2 + 1)]
print("held")
"""

REFUSED = """
with open("in.jsonl", "w") as file:
    file.write('{"prompt": "a"}\\n' + '{"prompt": 5, "params": {"n": 2}}\\n' * ROWS)
limited(16 << 20)
with Job("in.jsonl", "out.jsonl", PARAMS, SETTINGS) as job:
    status = job.run(at_once)
assert (status.done, status.failed) == (2 * ROWS + 1, 2 * ROWS)
print("held")
"""

WASTE = """
with open("in.jsonl", "wb") as file:
    file.write(b"\\n \\n" * 1_000_000 + b'{"prompt": "a", "params": {"n": 65536}}\\n' * ROWS)
limited(16 << 20)
with Job("in.jsonl", "out.jsonl", PARAMS, SETTINGS) as job:
    assert job.missing == ROWS << 16
try:
    with open("in.jsonl", "ab") as file:
        file.write(b"[" * 1_000_000)
    Job("in.jsonl", "other.jsonl", PARAMS, SETTINGS)
except RingkvError as error:
    assert "nested too deep" in str(error) and len(str(error)) < 300
print("held")
"""


# A run, a resumed one with more rows, and one that takes out errors: each is killed at every call that touches a file,
# halfway through where it writes. The settings go through a buffer; between their bytes and their name is a sync.
KILLED = """
import signal
from job_runs import FakeEngine, tokens_without_errors, write_rows

def dying(at):
    left = [at]
    write = os.write
    def wrapped(call):
        def calling(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                if call is write:
                    call(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return calling
    for name in ("write", "fsync", "replace", "ftruncate", "open"):
        setattr(os, name, wrapped(getattr(os, name)))

def child(at, source, output, **options):
    pid = os.fork()
    if not pid:
        try:
            if at is not None:
                dying(at)
            with Job(source, output, PARAMS, SETTINGS, **options) as job:
                job.run(FakeEngine(order=at or 0).iterate)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

rows = [{"prompt": prompt, "params": {"n": 2}} for prompt in ("a", "bad", "c", "d")][:ROWS]
few, all = write_rows(Path("few.jsonl"), *rows[:-1]), write_rows(Path("all.jsonl"), *rows)
assert child(None, all, "unbroken") == 0
expected, at, codes = tokens_without_errors(Path("unbroken")), 0, {-9}
while -9 in codes:
    for each in Path().glob("out*"):
        each.unlink()
    codes = {child(at, few, "out"), child(at, all, "out"), child(at, all, "out", retry_errors=True)}
    assert codes <= {0, -9}, codes
    assert child(None, all, "out", retry_errors=True) == 0
    assert tokens_without_errors(Path("out")) == expected
    assert len(open("out").readlines()) == 2 * ROWS
    at += 1
assert at > 15, at
print("held")
"""


def held(folder: Path, script: str, rows: int) -> None:
    """Run a script in a child, which must come to its end."""
    child = CHILD.replace("HELPERS", repr(str(HELPERS))).replace("SCRIPT", script).replace("{rows}", str(rows))
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd=folder, timeout=240)
    assert (done.stdout, done.returncode) == ("held\n", 0), done.stderr[-3000:]


@pytest.mark.parametrize(
    "script, rows", [(MANY, 20_000), (REFUSED, 5_000), (WASTE, 100)], ids=["many", "refused", "waste"]
)
def test_a_large_file_takes_little_memory_and_is_prepared_row_by_row(tmp_path, script, rows):
    """Oracle: the kernel, which gives 16 MiB and no more; what is prepared is counted, not timed."""
    held(tmp_path, script, rows)


def test_a_run_that_is_killed_at_any_call_goes_on(tmp_path):
    """Oracle: the same rows in one run."""
    held(tmp_path, KILLED, 4)
