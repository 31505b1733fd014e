"""The floors of the house, read from the source: cli -> apps -> engine -> models -> kernels, and no cycle anywhere.

Imports in function bodies and under TYPE_CHECKING count as all others do.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ringkv.engine

ROOT = Path(__file__).parent.parent
FLOORS = ("kernels", "models", "engine", "apps")
SHARED = ("ringkv.errors", "ringkv.files")
MAY_IMPORT = {
    "kernels": ("ringkv.kernels",),
    "models": ("ringkv.models", "ringkv.kernels"),
    "engine": ("ringkv.engine", "ringkv.models", "ringkv.kernels"),
    "apps": ("ringkv.apps",),
    "cli": ("ringkv.apps",),
}
FRONT_DOOR = "ringkv.engine"


def name_of(path: Path) -> str:
    """The dotted name of a module of the package."""
    return ".".join(["ringkv", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {name_of(path): path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))}
MODULES |= {f"ringkv.{name}": ROOT / f"{name}.py" for name in ("cli", "errors", "files")}
USERS = [name for name in MODULES if name.split(".")[1] in ("apps", "cli")]


def imports(source: str, modules: set[str]) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import of ours at any depth; the name is None where it is a module itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "ringkv")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names if node.module is not None and node.module.split(".")[0] == "ringkv" else ():
                inner = f"{node.module}.{alias.name}"
                yield (inner, None) if inner in modules else (str(node.module), alias.name)


def imported(name: str) -> list[tuple[str, str | None]]:
    return list(imports(MODULES[name].read_text(), set(MODULES)))


def allowed(name: str, module: str, what: str | None) -> bool:
    floor = name.split(".")[1]
    if module == FRONT_DOOR:
        return floor in ("apps", "cli") and what is not None
    if any(f"{module}.".startswith(f"{package}.") for package in (*MAY_IMPORT.get(floor, ()), *SHARED)):
        return True
    return (module, what) == ("ringkv", "__version__")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    for module, what in imported(name):
        assert allowed(name, module, what), f"{name} imports {what or 'all'} from {module}"


def test_what_may_not_be_imported_is_seen():
    for name, module, what in (
        ("ringkv.kernels.layer", "ringkv.models.config", "ModelConfig"),
        ("ringkv.models.rope", "ringkv.engine.config", "RingConfig"),
        ("ringkv.engine.loop", "ringkv.apps.jobs.job", "Job"),
        ("ringkv.engine.loop", FRONT_DOOR, "Engine"),
        ("ringkv.engine.loop", "ringkv", "Engine"),
        ("ringkv.apps.options", "ringkv.engine.config", "RingConfig"),
        ("ringkv.apps.options", FRONT_DOOR, None),
        ("ringkv.apps.options", "ringkv.kernels.table", None),
        ("ringkv.apps.options", "ringkv.enginery", None),
        ("ringkv.errors", "ringkv.kernels.table", None),
    ):
        assert not allowed(name, module, what)


def test_the_front_door_lists_what_the_apps_use_and_no_more():
    """The same names three times: in its table, for type checkers, and in the imports of apps and cli."""
    used = {what for name in USERS for module, what in imported(name) if module == FRONT_DOOR}
    assert used == set(ringkv.engine._HOME)
    typed = {what: module for module, what in imported(FRONT_DOOR)}
    assert typed == ringkv.engine._HOME
    assert dir(ringkv.engine) == sorted(typed)
    for name in typed:
        assert getattr(ringkv.engine, name) is getattr(sys.modules[typed[name]], name)
    with pytest.raises(AttributeError, match=r"module 'ringkv.engine' has no attribute 'Nothing'"):
        _ = ringkv.engine.Nothing


def test_no_two_modules_import_each_other_however_indirectly():
    # Nobody inside imports the front door, which the first test holds.
    graph = {name: {module for module, _ in imported(name)} - {name} for name in MODULES if name != FRONT_DOOR}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_cycle_and_what_is_hidden_are_seen():
    source = """
if TYPE_CHECKING:
    from ringkv.models.config import ModelConfig
def f():
    from ringkv.engine.ring import storage as ring
    import ringkv.cli
"""
    modules = {"ringkv.models.config", "ringkv.engine.ring.storage", "ringkv.cli"}
    assert set(imports(source, modules)) == {
        ("ringkv.models.config", "ModelConfig"),
        ("ringkv.engine.ring.storage", None),
        ("ringkv.cli", None),
    }
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def private(source: str) -> list[str]:
    """Attributes that begin with an underscore, of anything but self and cls."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


TOOLS = [*(MODULES[name] for name in USERS), *sorted((ROOT / "bench").rglob("*.py"))]


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_apps_and_benchmarks_use_public_attributes_only(path):
    assert private(path.read_text()) == []


def test_private_attributes_are_seen():
    assert private("self._a = cls._b.c\ndef f():\n    return x.y._z[0], x.__doc__") == ["line 3: x.y._z"]


def test_only_files_of_prompts_are_locked():
    locking = {name for name, path in MODULES.items() if "fcntl" in path.read_text()}
    assert locking == {"ringkv.apps.jobs.results"}
    users = {name for name in MODULES if any(module in locking for module, _ in imported(name))}
    assert users == {"ringkv.apps.jobs.job"}


def test_the_core_imports_no_app():
    code = "import sys, ringkv.engine.engine; print([name for name in sys.modules if name.startswith('ringkv.apps')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_kernels_package_holds_no_code():
    (docstring,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
