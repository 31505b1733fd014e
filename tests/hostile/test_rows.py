"""Files of prompts that are large or odd, in a process with limits of time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import json, os, resource, sys
sys.path.insert(0, {helpers!r})
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
{script}
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


@pytest.mark.parametrize(
    "script, rows", [(MANY, 20_000), (REFUSED, 5_000), (WASTE, 100)], ids=["many", "refused", "waste"]
)
def test_a_large_file_takes_little_memory_and_is_prepared_row_by_row(tmp_path, script, rows):
    """Oracle: the kernel, which gives 16 MiB and no more; what is prepared is counted, not timed."""
    child = CHILD.format(helpers=str(Path(__file__).parents[1] / "helpers"), rows=rows, script=script)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert (done.stdout, done.returncode) == ("held\n", 0), done.stderr[-3000:]
