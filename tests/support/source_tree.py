"""The source tree as data: its files, and who imports whom."""

import ast
import os
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "batcher", "gpu_worker", "common", "deploy")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

Graph = dict[str, set[str]]
"""Who imports whom."""


def python_path() -> str:
    """PYTHONPATH of a process that runs this tree: what this process has there follows."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """`api.http.body` of api/http/body.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {name_of(path): path for path in FILES if path.name != "__init__.py"}


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of this tree that a file imports, anywhere in it."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES or node.module in MODULES:
                    yield inner if inner in MODULES else str(node.module)


@cache
def module_graph() -> Graph:
    return {module: set(imported_modules(path)) - {module} for module, path in MODULES.items()}


def circle(graph: Graph) -> list[str]:
    """Names along one circle, or nothing where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
