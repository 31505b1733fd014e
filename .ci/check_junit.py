"""Fail unless the report shows tests that ran, and no skip but those marked gpu."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

MUST_RUN = ("test_smollm2", "test_golden", "test_naive")

cases = list(ElementTree.parse(sys.argv[1]).getroot().iter("testcase"))
skipped = [
    f"{case.get('classname')}.{case.get('name')}: {skip.get('message')}"
    for case in cases
    for skip in case.iter("skipped")
    if not (skip.get("message") or "").startswith("gpu:")
]
absent = [name for name in MUST_RUN if not any(name in (case.get("classname") or "") for case in cases)]
if skipped or absent or len(cases) < 100:
    sys.exit("\n".join([f"{len(cases)} tests ran", *(f"no tests of {name}" for name in absent), *skipped]))
print(f"{len(cases)} tests, none skipped that may not be")
