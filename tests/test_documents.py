"""The documents agree with the tree: the layout in CONTRIBUTING.md, the paths that are named, the order of the log."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = {".py", ".c", ".h", ".html", ".css", ".js", ".safetensors", ""}
# Folders without code of ours: .gitignore lists those that tools make.
IGNORED = (".git/", *(line for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")))


def folders(root: Path) -> set[str]:
    """Every folder below ``root`` that holds code or golden tensors, as ``a/b/``; the root itself is ``./``."""
    found = set()
    for path in root.iterdir():
        if path.is_dir() and not any(fnmatch(f"{path.name}/", pattern) for pattern in IGNORED):
            found |= {f"{path.name}/{below}".removesuffix("./") for below in folders(path)}
        elif path.is_file() and path.suffix in CODE:
            found.add("./")
    return found


def layout() -> list[str]:
    """The folders that the table of CONTRIBUTING.md names."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+/)` \|", table, re.M)


def test_the_layout_is_the_tree():
    there = folders(ROOT)
    mirrors = {folder for folder in there if re.match(r"tests/(apps|engine|models|kernels)/", folder)}
    assert sorted(layout()) == sorted(there - mirrors)
    assert {folder.removeprefix("tests/") for folder in mirrors} <= there, "tests/ mirrors the package"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "weights.md"])
def test_every_path_that_is_named_is_there(document):
    text = (ROOT / document).read_text()
    paths = set(re.findall(r"`((?:[\w.*-]+/)*[\w.*-]+\.(?:py|md|txt|png)|\.?\w[\w./-]*/)`", text))
    paths |= {link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")}
    assert document == "weights.md" or paths
    assert [path for path in sorted(paths) if not any(ROOT.glob(path.rstrip("/")))] == []


def test_the_log_begins_with_the_newest_entry():
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d): \S", (ROOT / "bench" / "LOG.md").read_text(), re.M)
    assert len(dates) == (ROOT / "bench" / "LOG.md").read_text().count("\n## ")
    assert dates == sorted(dates, reverse=True)
