"""Kernels run here in Triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import version

import pytest

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported too early"
os.environ["TRITON_INTERPRET"] = "1"

# Where there is no triton (macOS, Windows, ARM) the twins are all there is to test.
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*_triton.py"]
elif version("triton").startswith("3.6.") and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
    raise pytest.UsageError("triton 3.6 interprets kernels under numpy below 2.4 alone: pip install 'numpy<2.4'")
