"""The rooms of the tree: who may import whom, and how large they may be."""

from collections import Counter
from pathlib import Path

import pytest

from tests.repo import unfinished
from tests.support.source_tree import FILES, PACKAGES, ROOT, circle, module_graph, room_graph

MAX_FILES = 18


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert unfinished.CIRCLES or circle(module_graph()) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert unfinished.CIRCLES or circle(room_graph()) == []


@pytest.mark.parametrize("package", (*PACKAGES, "tests", "benchmarks"))
def test_a_folder_has_at_most_18_files(package: str) -> None:
    """`__init__.py` not counted."""
    files = [path for path in (ROOT / package).rglob("*") if path.is_file() and is_source(path)]
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def is_source(path: Path) -> bool:
    return path.name != "__init__.py" and not {"__pycache__", ".hypothesis"} & set(path.parts)


def test_no_import_is_for_type_checkers_only() -> None:
    """It would hide a circle."""
    found = [path.relative_to(ROOT).as_posix() for path in FILES if "TYPE_CHECKING" in path.read_text()]
    assert set(found) - set(unfinished.TYPE_CHECKING) == set()
