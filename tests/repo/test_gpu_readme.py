"""tests/gpu/README.md is true: the tests that it names exist, and benchmarks/gpu/run.sh runs all files."""

import ast
import re
from pathlib import Path

from tests.support.source_tree import ROOT

GPU = ROOT / "tests" / "gpu"
README = (GPU / "README.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def functions_of(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_the_tests_that_it_names_exist() -> None:
    named = set(NAMED.findall(README))
    assert len(named) > 30
    known = {(file.name, test) for file in GPU.glob("test_*.py") for test in functions_of(file)}
    assert named - known == set()


def test_each_file_covers_what_no_imitation_does() -> None:
    assert {file for file, _ in NAMED.findall(README)} == {file.name for file in GPU.glob("test_*.py")}


def test_the_command_for_a_card_runs_all_files() -> None:
    script = (ROOT / "benchmarks/gpu/run.sh").read_text()
    [names] = re.findall(r"for file in ([\w ]+); do", script)
    assert sorted(names.split()) == sorted(file.stem.removeprefix("test_") for file in GPU.glob("test_*.py"))
