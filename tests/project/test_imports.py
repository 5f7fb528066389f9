"""Modules import only what stands below them: no circle, imports within functions included."""

import ast
import graphlib
from pathlib import Path

import pytest

import fastvit

PACKAGE = Path(fastvit.__file__).parent


def imports(file: Path) -> set[str]:
    """The modules of the package that a file imports, as dotted names."""
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    parts, found = name.removesuffix(".__init__").split("."), set()
    here = parts if file.name == "__init__.py" else parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1] + (node.module.split(".") if node.module else [])
            found |= {".".join([*base, alias.name]) for alias in node.names} | {".".join(base)}
    return found


@pytest.mark.parametrize("package", ["recompute", "conversion", "sync", "training", "compat/apex/amp"])
def test_no_circle(package):
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): imports(file)
        for file in (PACKAGE / package).glob("*.py")
        if file.name != "__init__.py"
    }
    assert len(files) >= 5
    graph = {name: found & files.keys() for name, found in files.items()}
    assert any(graph.values())
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle
    assert set(order) == set(files)


def test_conversion_knows_the_engine_by_its_package_alone():
    known = {"fastvit.recompute"} | {f"fastvit.recompute.{name}" for name in fastvit.recompute.__all__}
    for file in (PACKAGE / "conversion").glob("*.py"):
        assert {name for name in imports(file) if name.startswith("fastvit.recompute")} <= known, file.name
