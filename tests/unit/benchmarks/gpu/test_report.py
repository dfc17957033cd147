"""The report of a card says what was met, what failed, and what is missing; and a run of the script that was
cut off goes on: benchmarks/gpu/run.sh.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.report import Folder, report
from tests.support.source_tree import ROOT

PYTEST = """tests/gpu/test_kernels.py::test_one[cuda] PASSED
tests/gpu/test_kernels.py::test_two[cuda] FAILED
=========================== short test summary info ============================
FAILED tests/gpu/test_kernels.py::test_two[cuda] - AssertionError: 3 rows
=================== 1 failed, 40 passed, 2 skipped in 61.20s ===================
"""
GRID = "  1 rows at   240: step   4.60 ms, 0.90 of the floor (4.14 ms);    217 tokens/s; the host waits\n"
STRUCTURED = "http://h: plain → with a schema\n   32 streams: 4000 → 3720 (0.93), 28 → 120, 0.1 → 1.5\n"


def done(folder: Path, item: str, log: str, status: int = 0) -> None:
    (folder / f"{item}.log").write_text(log)
    (folder / f"{item}.done").write_text(f"{status} 12\n")


def load(token_ms: float, tokens_per_s: float, streams: int = 1, numbers: str = "in=128 out=256") -> str:
    head = f"streams={streams} {numbers}"
    return (
        f"{head} | Output token throughput (tok/s): {tokens_per_s}\n{head} | Median TPOT (ms): {token_ms}\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    done(tmp_path, "machine", "GPU name: NVIDIA H200\ntorch: 2.13.0\n")
    done(tmp_path, "test_kernels", PYTEST, 1)
    done(tmp_path, "engine-m8", GRID)
    done(tmp_path, "ours-m8-1,8,128,256", load(4.2, 238))
    done(tmp_path, "vllm-m8-1,8,128,256", load(4.72, 211))
    done(tmp_path, "ours-m135-256,768,512,256", load(9.0, 40_000, 256, "in=512 out=256"))
    done(tmp_path, "vllm-m135-256,768,512,256", load(9.0, 34_254, 256, "in=512 out=256"))
    done(tmp_path, "ours-m8-structured", STRUCTURED)
    return tmp_path


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]


def test_each_figure_that_was_wanted_is_met_or_not(folder: Path) -> None:
    found = rows(report(Folder(folder)))
    one = "streams=1 in=128 out=256"
    assert ["m8", one, "Median TPOT (ms)", "4.20", "4.72", "4.14", "0.89", "≤ 0.92", "yes"] in found
    many = ["streams=256 in=512 out=256", "Output token throughput (tok/s)"]
    assert ["m135", *many, "40000", "34254", "–", "1.17", "≥ 2", "**no**"] in found
    assert [row[-1] for row in found if row[:2] == ["m8-fp8", "streams=256"]] == ["not measured"]
    assert [row[place] for row in found if row[1:2] == ["streams=32 structured"] for place in (3, -1)] == [
        "0.93",
        "**no**",
    ]


def test_failed_tests_and_their_reasons_are_told(folder: Path) -> None:
    text = report(Folder(folder))
    assert ["tests/gpu/test_kernels.py", "40", "1", "", "2", "exit status 1 after 12 s"] in rows(text)
    assert "- `tests/gpu/test_kernels.py::test_two[cuda]`: AssertionError: 3 rows" in text
    assert "Failed: test_kernels." in text


def test_what_was_cut_off_is_told(folder: Path) -> None:
    """A test file: with the test that ran."""
    (folder / "test_kernels.done").unlink()
    (folder / "test_kernels.log").write_text(
        PYTEST.splitlines()[0] + "\ntests/gpu/test_kernels.py::test_two[cuda] "
    )
    (folder / "ours-m8-fp8.failed").touch()
    (folder / "ours-m8-fp8.server.log").write_text("no memory")
    text = report(Folder(folder))
    assert "1 were cut off" in text and "`tests/gpu/test_kernels.py::test_two[cuda]` ran when" in text
    assert "Servers that did not start: ours-m8-fp8" in text and "no memory" in text


def test_a_folder_without_anything_has_a_report(tmp_path: Path) -> None:
    assert "0 items were begun" in report(Folder(tmp_path))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Stands in for the interpreter: notes what it is asked to run, and fails as `doctor`."""
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\necho "$2" >>"$0.ran"\n'
        '[ "$2" != benchmarks.gpu.report ] || echo "the report" >"$3/report.md"\n'
        '[ "$2" = deploy.cli ] && sleep "${SLEEP_S:-0}" && exit 3 || exit 0\n'
    )
    script.chmod(0o755)
    return script


def run(folder: Path, python: Path, **environ: str) -> int:
    command = [str(ROOT / "benchmarks/gpu/run.sh"), str(folder), "--part", "machine"]
    environment = os.environ | {"PYTHON": str(python), "DEVICE": "cpu"} | environ
    return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode


def test_what_is_done_is_not_run_again(tmp_path: Path, python: Path) -> None:
    """Whether it failed or not; what follows a failure runs, and the report is copied."""
    out, copies = tmp_path / "out", tmp_path / "copies"
    copies.mkdir()
    assert run(out, python, COPY_TO=str(copies)) == 0
    assert (out / "machine.done").read_text().startswith("0 ")
    assert (out / "doctor.done").read_text().startswith("3 ")
    assert (copies / "report.md").exists() and (copies / "logs.tar.gz").exists()
    (out / "machine.done").unlink()
    before = Path(f"{python}.ran").read_text().split()
    assert run(out, python) == 0
    again = Path(f"{python}.ran").read_text().split()[len(before) :]
    assert "benchmarks.gpu.machine" in again and "deploy.cli" not in again


def test_an_item_that_the_budget_cuts_off_is_not_done(tmp_path: Path, python: Path) -> None:
    """The next call runs it."""
    out = tmp_path / "out"
    assert run(out, python, BUDGET_S="20") == 3 and not (out / "machine.done").exists()
    assert run(out, python) == 0 and (out / "machine.done").exists()


def test_the_script_runs_all_files_of_tests() -> None:
    script = (ROOT / "benchmarks/gpu/run.sh").read_text()
    [names] = re.findall(r"for file in ([\w ]+); do", script)
    files = [file.stem.removeprefix("test_") for file in (ROOT / "tests/gpu").glob("test_*.py")]
    assert sorted(names.split()) == sorted(files)
