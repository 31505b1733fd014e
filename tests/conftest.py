"""Fixtures that every part of the suite shares."""

from __future__ import annotations

import sys
from pathlib import Path

# transformers probes for a package named `kernels`, and would take ours where the root is on the path.
_ROOT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
