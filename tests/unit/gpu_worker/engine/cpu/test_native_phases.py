"""Phases of work that threads share: a thread without a core holds up nobody, and every unit runs once."""

import subprocess
from pathlib import Path

import pytest

from common.process.machine import SOURCES
from gpu_worker.engine.cpu import native

pytestmark = pytest.mark.usefixtures("library")

TIMEOUT_S = 60
PROGRAM = """
#include "phases.h"
#include <cstdio>
#include <cstdlib>

// The last thread comes once the others have done everything, as if it had lost its core meanwhile.
int main(int, char** arguments) {
    int threads = atoi(arguments[1]), units = atoi(arguments[2]), phases = atoi(arguments[3]);
    std::vector<std::atomic<int>> runs(units);
    std::atomic<int> unfinished{0};
    std::atomic<bool> over{threads == 1};
    Progress progress(threads);
    #pragma omp parallel num_threads(threads)
    {
        Phases shared(progress);
        if (threads > 1 && this_thread() == threads - 1)
            while (!over) std::this_thread::yield();
        for (int phase = 0; phase < phases; phase++)
            shared.run(units, [&](int unit) {
                if (runs[unit]++ != phase || runs[(unit + 1) % units] < phase) unfinished++;
            });
        over = true;
    }
    for (auto& one : runs) if (one != phases) unfinished++;
    printf("%d", unfinished.load());
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    (folder / "phases.cpp").write_text(PROGRAM)
    source = str(SOURCES / "kernels.cpp")
    words = [word for word in native.compile_command() if word not in ("-shared", "-fPIC", "-O3")]
    words = [str(folder / "phases.cpp") if word == source else word for word in words]
    command = [*words, f"-I{SOURCES}", "-o", str(folder / "phases")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return folder / "phases"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("units", [1, 3, 100])
def test_every_unit_runs_once_a_phase_while_a_thread_is_away(program: Path, threads: int, units: int) -> None:
    command = [str(program), str(threads), str(units), "300"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert found.stdout == "0"
