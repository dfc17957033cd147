"""The native library: builds, phases of work, which layers are fused, and an engine without a compiler."""

import ctypes
import logging
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.process import machine
from common.settings.settings import SettingError
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.cpu import fused_layer, native, packed_linear
from gpu_worker.engine.cpu.compile import SOURCES, compile_command
from gpu_worker.engine.cpu.packed_linear import LargePages, OneDnnLinear
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES, LLAMA
from tests.support.source_tree import ROOT
from tests.unit.gpu_worker.engine.attention import test_kv_cache as attention
from tests.unit.gpu_worker.engine.cpu import test_packed_linear as products
from tests.unit.gpu_worker.engine.sampling import test_sampling_kernels as choice

pytestmark = pytest.mark.usefixtures("library")

ARM_COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' code runs on x86-64 only")
@pytest.mark.parametrize(
    ("march", "kind"),
    [(f"x86-64-v{level}", "split") for level in (2, 3, 4)]
    + [("native", kind) for kind in ("tiles", "pairs", "one thread")],
)
def test_builds_for_other_processors_compute_the_same(
    march: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other vectors; bfloat16 by tiles, in pairs (where this processor can), or widened; no OpenMP."""
    if (march == "x86-64-v4" and "avx512vl" not in machine.features()) or (
        kind == "tiles" and not machine.permits_tiles()
    ):
        pytest.skip("this processor cannot run it")
    words = compile_command(kind != "one thread")
    command = [word.replace("=native", f"={march}") for word in words if not word.startswith("-D")]
    command += [] if kind == "tiles" else ["-DNO_AMX"]
    command += ["-DSPLIT_PAIRS"] if kind == "split" else []
    command += (
        ["-fno-gnu-unique"] if "g++" in command[0] or command[0] == "c++" else []
    )  # several builds in one process
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "compile_command", lambda openmp: command)
    built = native.library.__wrapped__()
    assert built and built.tf_multiplies(native.TYPE_CODES[torch.bfloat16]) == (march != "x86-64-v2")
    for dtype in native.TYPE_CODES:
        for stored in (None, *native.STORED_CODES):
            attention.test_outputs_equal_those_of_torch(dtype, 16, stored, built)
        for size in (60, 3000):
            choice.test_kernels_sample_the_same_ids_as_torch(size, dtype, built)
        if built.tf_multiplies(native.TYPE_CODES[dtype]):
            for inputs, outputs, bias in products.SHAPES:
                products.test_products_do_not_depend_on_the_batch(dtype, True, inputs, outputs, bias, built)
                products.test_products_do_not_depend_on_the_batch(dtype, False, inputs, outputs, bias, built)
            assert built.tf_rounds(native.TYPE_CODES[dtype]) == (dtype == torch.float32 or kind != "tiles")
            for bits, size, more in ((4, 16, "offsets"), (4, 32, ""), (8, 32, "")):
                products.test_rounded_rows_give_products_near_the_exact_ones(bits, size, more, dtype, built)
            for bits, more in ((4, "offsets"), (4, "codes"), (8, "")):
                for scales in (torch.float16, torch.float32):
                    products.test_weights_in_blocks_give_the_bits_of_plain_weights(
                        bits, 32, more, scales, dtype, built
                    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason="no compiler for ARM is installed")
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_kernels_compile_for_arm(source: Path) -> None:
    subprocess.run([ARM_COMPILER, "-std=c++17", "-fopenmp", "-fsyntax-only", source], check=True)


def test_an_engine_without_a_compiler_generates_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log says so. The family's code takes views of what attention returns."""
    dense = {"head_dim": 16, "num_dense_layers": LLAMA["num_hidden_layers"], "sliding_window": 16}
    model = tiny_models.save(tmp_path, "Afmoe", LLAMA | dense)
    expected = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    monkeypatch.setattr(machine, "COMPILERS", ())
    monkeypatch.setattr(native, "library", native.functools.cache(native.library.__wrapped__))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path)
    assert [record.message for record in caplog.records if record.name == native.__name__] == [
        "no native kernels, torch's are used and are slower: no C++ compiler (g++ or clang++) is installed"
    ]
    assert isinstance(engine.loaded.backend, SdpaBackend) and isinstance(
        packed_linear.pack_linear(nn.Linear(8, 8), False, LargePages()), OneDnnLinear
    )
    assert play(engine, dict(enumerate(prompts()))) == expected


COMPILER = """#!/bin/sh
for word; do case "$before" in -c) echo "${word##*/}" >>$LOG ;; -o) echo >"$word" ;; esac; before=$word; done
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


@pytest.mark.parametrize("fails", ["nothing", "sampler.cpp"])
def test_processes_compile_a_source_once_without_any_package(fails: str, tmp_path: Path) -> None:
    """Of two at once, one waits. A source that fails leaves no object."""
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o700)
    log, sources = tmp_path / "log", {source.name for source in SOURCES.glob("*.cpp")}
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "LOG": str(log)}
    command = [sys.executable, "-S", "-m", "gpu_worker.engine.cpu.compile"]
    both = [subprocess.Popen(command, env=environ | {"FAILS": fails}, cwd=ROOT) for _ in range(2)]
    assert {one.wait(TIMEOUT_S) for one in both} == {int(fails in sources)}
    assert Counter(log.read_text().split()) == {name: 1 + (name == fails) for name in sources}
    assert {f"{path.stem.split('-')[-1]}.cpp" for path in tmp_path.glob("*/native/*.o")} == sources - {fails}


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
    words = [word for word in compile_command() if word not in ("-fPIC", "-O3")]
    files = [str(folder / "phases.cpp"), *native.openmp_runtime(), "-o", str(folder / "phases")]
    subprocess.run([*words, f"-I{SOURCES}", *files], check=True, timeout=TIMEOUT_S)
    return folder / "phases"


@pytest.mark.parametrize(("threads", "units"), [(1, 3), (2, 1), (5, 100)])
def test_every_unit_runs_once_a_phase_while_a_thread_is_away(program: Path, threads: int, units: int) -> None:
    command = [str(program), str(threads), str(units), "300"]
    assert subprocess.check_output(command, timeout=TIMEOUT_S) == b"0"


def test_the_openmp_runtime_is_torch_s_where_a_package_brings_another(tmp_path: Path) -> None:
    """As scikit-learn does: with both, each would have threads of its own."""
    [own] = native.openmp_runtime()
    ctypes.CDLL(str(shutil.copy(own, tmp_path / "libgomp-0.so")))
    assert native.openmp_runtime.__wrapped__() == [own]


def num_fused(monkeypatch: pytest.MonkeyPatch, folder: Path, family: str, **sizes: float) -> int:
    if not native.library().tf_multiplies(native.TYPE_CODES[torch.float32]):  # type: ignore[union-attr]
        pytest.skip("torch's products are used on this processor")
    counts: list[int] = []

    def fuse_layers(*arguments: Any) -> int:
        counts.append(fused_layer.fuse_layers(*arguments))
        return counts[-1]

    monkeypatch.setattr(load, "fuse_layers", fuse_layers)
    tiny_models.save(folder, FAMILIES[family][0], FAMILIES[family][1] | sizes)
    engine_of(folder)
    return counts[0]


@pytest.mark.parametrize(
    ("family", "expected"),
    [("Llama", 3), ("Qwen3", 3), ("SmolLM3", 3), ("Gemma2", 0), ("Ministral3", 0)],
)
def test_layers_are_fused(
    family: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_fused(monkeypatch, tmp_path, family) == expected


@pytest.mark.parametrize(("between", "joined"), [(1, True), (2, False)])
def test_layers_are_joined_where_nothing_is_between(
    between: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Identity(), nn.Identity()
    fused = {first: lambda states: states * 3, second: lambda states: states + 5}
    for layer, forward in fused.items():
        layer.forward = forward  # type: ignore[method-assign]
    monkeypatch.setattr(
        fused_layer.FusedLayers, "joined", lambda parts: lambda states: parts[1](parts[0](states))
    )
    fused_layer.join_layers(fused, lambda: second(first(torch.ones(2)) * between))  # type: ignore[arg-type]
    assert (second.forward is fused_layer.pass_through) == joined == (first.forward is not fused[first])  # type: ignore[comparison-overlap]


def logprobs(engine: Engine, prefixes: dict[int, list[int]], prefill_tokens: int) -> dict[int, list[float]]:
    played = player(engine, prefill_tokens)
    played.run([played.start(row, ids, 20, ignore_eos=True) for row, ids in prefixes.items()])
    found: dict[int, list[float]] = {row: [] for row in prefixes}
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            found[row].append(logprob)
    return found


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "INT8_ACTIVATIONS"])
def test_logprobs_do_not_depend_on_the_batch(rounds: bool, tmp_path: Path) -> None:
    """Alone, with others, in chunks. Those of rounded rows are near the exact ones."""
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    if rounds and not packed_linear.can_round(torch.float32):
        with pytest.raises(SettingError, match="INT8_ACTIVATIONS"):
            engine_of(tmp_path, int8_activations=True)
        return
    rows_of, exact = dict(enumerate(prompts())), engine_of(tmp_path, quantize="eetq")
    engine = engine_of(tmp_path, quantize="eetq", int8_activations=rounds)
    first, second = (logprobs(one, {0: rows_of[0]}, 1000)[0][0] for one in (engine, exact))
    assert (first != second) == rounds and abs(first - second) < 0.1
    together = logprobs(engine, rows_of, 1000)
    assert logprobs(engine, rows_of, 7) == together
    assert {row: logprobs(engine, {row: prompt}, 1000)[row] for row, prompt in rows_of.items()} == together
