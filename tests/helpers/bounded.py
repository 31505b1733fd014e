"""Runs a script on hostile input in a child process that may take only so much time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# What a child begins with. Memory counts from here on, with everything imported. ``tried`` notes what came of a case:
# its result, or the name of the error's class and its message.
_PRELUDE = """
import json, resource, sys
from pathlib import Path
import tokenizers, torch
import ringkv.engine.engine
from ringkv import Engine, Policy, RingConfig, RingkvError, SamplingParams
sys.path.append({helpers!r})
torch.set_num_threads(1)
now = 1024 * int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (now + {memory},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({seconds},) * 2)
outcomes = {{}}

def tried(name, case):
    try:
        outcomes[name] = case()
    except BaseException as error:
        outcomes[name] = f"{{type(error).__name__}}: {{error}}"

"""


def run_bounded(script: str, folder: Path, *, seconds: int = 60, memory: int = 1 << 30) -> dict[str, Any]:
    """The ``outcomes`` of a script that is run in this folder.

    Args:
        seconds: of a processor's time; four times as many may pass, for a machine that has other things to do.
        memory: bytes of addresses beside those that the imports take.
    """
    prelude = _PRELUDE.format(helpers=str(Path(__file__).parent), memory=memory, seconds=seconds)
    command = [sys.executable, "-c", f"{prelude}{script}\nprint(json.dumps(outcomes))"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=4 * seconds, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes
