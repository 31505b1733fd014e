"""Imports point one way: cli -> apps -> engine -> models -> kernels; inside functions too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "engine": {"engine", "models", "kernels"},
    "apps": {"apps", "engine", "models", "kernels"},
}
MODULES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported(source: str) -> set[str]:
    """Every module that a file names in an import, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path.read_text()):
        if name.startswith("ringkv."):
            assert name.split(".")[1] in MAY_IMPORT[package] | {"errors", "files"}, f"{path.name} imports {name}"


def test_the_walk_sees_function_bodies():
    assert imported("def f():\n    from ringkv.engine.ring import storage as ring\n    import ringkv.cli") == {
        "ringkv.engine.ring.storage",
        "ringkv.cli",
    }


def test_kernels_package_holds_no_code():
    (docstring,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
