"""How files are written, where ruff and mypy do not check it."""

import ast

from tests.support.source_tree import FILES, PACKAGES, ROOT, parse

MAX_LINE = 110
WAIT_FOR = "asyncio.wait_for"


def test_lines_of_other_languages_are_as_short() -> None:
    """Ruff reads Python only."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*"))]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in (".lua", ".h", ".cpp", ".js")
        if any(len(line) > MAX_LINE for line in path.read_text().splitlines())
    }
    assert found == set()


def test_no_wait_is_bounded_by_wait_for() -> None:
    """In Python 3.11 it loses the cancellation of a task whose wait has just ended, so that the task goes on.
    asyncio.timeout does not.
    """
    calls = {
        path: [node for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)] for path in FILES
    }
    found = [path for path, nodes in calls.items() if any(ast.unparse(node) == WAIT_FOR for node in nodes)]
    assert [path.relative_to(ROOT).as_posix() for path in found] == []
