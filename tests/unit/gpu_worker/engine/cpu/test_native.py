"""The native library: builds for other processors, the cache of builds, and engines without a compiler."""

import logging
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.process import machine
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.cpu import native, packed_linear
from gpu_worker.engine.cpu.packed_linear import LargePages, OneDnnLinear
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import NEW_TOKENS, engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.unit.gpu_worker.engine.attention import test_cpu_paged as attention
from tests.unit.gpu_worker.engine.cpu import test_packed_linear as products
from tests.unit.gpu_worker.engine.sampling import test_native_sampler as choice

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' code runs on x86-64 only")
@pytest.mark.parametrize(
    ("march", "kind"),
    [
        ("x86-64-v2", "split"),
        ("x86-64-v3", "split"),
        ("native", "tiles"),
        ("native", "pairs"),
        ("native", "split"),
        ("native", "one thread"),
    ],
)
def test_builds_for_other_processors_compute_the_same(
    march: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Narrower vectors; bfloat16 multiplied by tiles or in pairs, where this processor can, or widened; no
    OpenMP.
    """
    if kind == "tiles" and not machine.permits_tiles():
        pytest.skip("this processor has no tiles")
    command = [
        word.replace("=native", f"={march}") for word in native.compile_command() if not word.startswith("-D")
    ]
    command += [] if kind == "tiles" else ["-DNO_AMX"]
    command += ["-DSPLIT_PAIRS"] if kind == "split" else []
    command = [word for word in command if kind != "one thread" or word not in native.openmp_flags()]
    command += (
        ["-fno-gnu-unique"] if "g++" in command[0] or command[0] == "c++" else []
    )  # several builds in one process
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "compile_command", lambda: command)
    built = native.library.__wrapped__()
    assert built and built.tf_multiplies(native.TYPE_CODES[torch.bfloat16]) == (march != "x86-64-v2")
    for dtype in native.TYPE_CODES:
        for stored in (None, *native.STORED_CODES):
            attention.test_outputs_equal_those_of_torch(dtype, 16, stored, built)
        for size in (60, 3000):
            choice.test_kernels_sample_the_same_ids_as_torch(size, dtype, 3, built)
            choice.test_kernels_score_prompts_as_torch_does(size, dtype, built)
        if built.tf_multiplies(native.TYPE_CODES[dtype]):
            for inputs, outputs, bias in products.SHAPES:
                products.test_products_do_not_depend_on_the_batch(dtype, True, inputs, outputs, bias, built)
                products.test_products_do_not_depend_on_the_batch(dtype, False, inputs, outputs, bias, built)
    for bits in (4, 8):
        for scales in (torch.float16, torch.float32):
            products.test_weights_in_blocks_give_the_bits_of_plain_weights(bits, 32, bits == 4, scales, built)


def test_an_engine_without_a_compiler_generates_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log says so."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
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


@pytest.mark.slow
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its folder holds nothing but the library and a lock."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.subprocess, "run", calls := Recorded(native.subprocess.run))  # type: ignore[attr-defined]
    first = native.build_library()
    assert native.build_library() == first and calls.count == 3, "version, compilation, version"
    assert {path.name for path in first.parent.iterdir()} == {first.name, "lock"}


class Recorded:
    def __init__(self, run: Any) -> None:
        self.run = run
        self.count = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return self.run(*arguments, **options)


def test_without_permission_nothing_is_multiplied_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's rules may forbid their registers, whose use would end the process."""
    monkeypatch.setattr(machine, "permits_tiles", lambda: False)
    assert "-DNO_AMX" in native.compile_command()
