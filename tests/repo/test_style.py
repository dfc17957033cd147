"""How files are written, where ruff and mypy do not check it."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_tree import FILES, PACKAGES, ROOT, functions, parse

MAX_LINE = 110
MAX_LINES = 400
MAX_LINES_OF_TESTS = 400
WAIT_FOR = "asyncio.wait_for"
SHAPE = re.compile(r"\[[^\]]+\]")
DTYPE = re.compile(r"\b(float\d*|bfloat16|int\d*|uint8|bool|dtype)\b")
ENGINE = ROOT / "gpu_worker" / "engine"


def short(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def longer(paths: list[Path], most: int) -> list[str]:
    return short([path for path in paths if path.read_text().count("\n") > most])


def test_files_are_at_most_400_lines_long() -> None:
    code = [*FILES, *(ROOT / "benchmarks").rglob("*.py")]
    assert longer(code, MAX_LINES) == []


def test_files_of_tests_are_at_most_400_lines_long() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert longer(tests, MAX_LINES_OF_TESTS) == []


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


def test_a_class_has_a_name_of_its_own() -> None:
    nodes = (node for path in FILES for node in ast.walk(parse(path)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_init_sets_one_attribute_a_line() -> None:
    found = {path for path in FILES for function in functions(ast.walk(parse(path))) if sets_many(function)}
    assert short(sorted(found)) == []


def sets_many(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """`self.a, self.b = …` or `self.a = self.b = …` in `__init__`."""
    assigned = [node.targets for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return function.name == "__init__" and any(
        sum(isinstance(one, ast.Attribute) for one in attributes_of(targets)) > 1 for targets in assigned
    )


def attributes_of(targets: list[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def test_no_wait_is_bounded_by_wait_for() -> None:
    """In Python 3.11 it loses the cancellation of a task whose wait has just ended, so that the task goes on.
    asyncio.timeout does not.
    """
    calls = {
        path: [node for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)] for path in FILES
    }
    found = [path for path, nodes in calls.items() if any(ast.unparse(node) == WAIT_FOR for node in nodes)]
    assert short(found) == []


# --- tensors ------------------------------------------------------------------------------------------------


def test_functions_of_the_engine_say_shapes_and_dtypes_of_tensors() -> None:
    """The function's docstring says them, or its class's; for a function that no other module uses, the
    module's.
    """
    found = {
        path.relative_to(ENGINE).as_posix(): [*without_shapes(path)]
        for path in FILES
        if path.is_relative_to(ENGINE)
    }
    assert {path: names for path, names in found.items() if names} == {}


def without_shapes(path: Path) -> Iterator[str]:
    tree = parse(path)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    owners: list[ast.Module | ast.ClassDef] = [tree, *classes]
    for owner in owners:
        for function in functions(owner.body):
            if not is_public(function) or not has_tensors(function) or says_shapes(function):
                continue
            is_used_here_only = isinstance(owner, ast.Module) and function.name not in imported_names()
            if not (says_shapes(owner) and (owner is not tree or is_used_here_only)):
                yield function.name


def imported_names() -> set[str]:
    """Names that some module of the engine imports from another, or uses as an attribute of it."""
    nodes = [node for path in FILES if path.is_relative_to(ENGINE) for node in ast.walk(parse(path))]
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def is_public(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return not function.name.startswith("_")


def has_tensors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*function.args.args, *function.args.kwonlyargs, *function.args.posonlyargs]
    annotations = [argument.annotation for argument in arguments] + [function.returns]
    return any(annotation and "Tensor" in ast.unparse(annotation) for annotation in annotations)


def says_shapes(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> bool:
    text = ast.get_docstring(node) or ""
    return bool(SHAPE.search(text) and DTYPE.search(text))
