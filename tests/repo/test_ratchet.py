"""The tree only shrinks: statements and lines of Python of each package, words of docs/.

A change that adds takes something else away. One that takes away more than 1% lowers the number here, as the
warning asks. Statements are counted too, so that denser text gains nothing; docstrings are none.
"""

import ast
import warnings
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, parse

MOST = {  # statements, lines
    "api": (12_740, 24_565),
    "batcher": (2_850, 4_904),
    "gpu_worker": (10_855, 20_598),
    "common": (3_771, 7_500),
    "deploy": (2_550, 4_407),
    "tests": (30_464, 53_037),
    "benchmarks": (2_561, 4_302),
}
MOST_WORDS_OF_DOCS = 22_000
SLACK = 0.01


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def compare(what: str, found: int, most: int) -> None:
    assert found <= most, f"{what}: {found} > {most}; take as much away as you add"
    if found < most * (1 - SLACK):
        warnings.warn(f"{what}: {found} now; lower {most} in tests/repo/test_ratchet.py to it", stacklevel=2)


@pytest.mark.parametrize("folder", MOST)
def test_a_package_grows_in_neither_statements_nor_lines(folder: str) -> None:
    files: list[Path] = sorted((ROOT / folder).rglob("*.py"))
    most_statements, most_lines = MOST[folder]
    compare(f"statements of {folder}/", sum(statements(parse(path)) for path in files), most_statements)
    compare(f"lines of {folder}/", sum(path.read_text().count("\n") for path in files), most_lines)


def test_the_pages_of_docs_grow_in_no_words() -> None:
    words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    compare("words of docs/", words, MOST_WORDS_OF_DOCS)
