"""check_junit.py REPORT LEAST NAME...: fail unless so many tests ran, some of each name, and none skipped but gpu."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

report, least, *names = sys.argv[1:]

cases = list(ElementTree.parse(report).getroot().iter("testcase"))
skipped = [
    f"{case.get('classname')}.{case.get('name')}: {skip.get('message')}"
    for case in cases
    for skip in case.iter("skipped")
    if not (skip.get("message") or "").startswith("gpu:")
]
absent = [name for name in names if not any(name in (case.get("classname") or "") for case in cases)]
if skipped or absent or len(cases) < int(least):
    sys.exit("\n".join([f"{len(cases)} tests ran", *(f"no tests of {name}" for name in absent), *skipped]))
print(f"{len(cases)} tests, none skipped that may not be")
