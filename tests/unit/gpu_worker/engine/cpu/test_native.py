"""The native kernels against torch, and what is done where they cannot be built."""

import itertools
import logging
import math
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpu_worker.engine.attention.cpu_paged import CpuPagedBackend
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, KVCache, LayerSpec
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import Row, RowSlice, arrange
from gpu_worker.engine.cpu import fused_layer, native, packed_linear
from gpu_worker.engine.cpu.large_pages import LargePages
from gpu_worker.engine.cpu.packed_linear import NativeLinear, OneDnnLinear
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_models import FAMILIES
from tests.unit.gpu_worker.engine.model.test_families import engine_of, play, prompts
from tests.unit.gpu_worker.engine.sampling import test_cpu_sampler as choice

CPU = torch.device("cpu")
ERRORS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
BLOCKS = 99


@pytest.fixture(autouse=True)
def library() -> object:
    if (found := native.library()) is None:
        pytest.skip("no C++ compiler")
    return found


# --- attention ----------------------------------------------------------------------------------------------


def rows(block_size: int, lengths: tuple[int, ...]) -> list[Row]:
    """With blocks in no order."""
    shuffled = np.random.default_rng(0).permutation(np.arange(1, BLOCKS + 1)).astype(np.int32)
    sizes = [-(-(length + 4) // block_size) for length in lengths]
    parts = np.split(shuffled, np.cumsum(sizes))
    return [
        Row(number, np.zeros(length, np.int32), 0, 9, part)
        for number, (length, part) in enumerate(zip(lengths, parts, strict=False))
    ]


def chunk(row: Row, begin: int, count: int) -> RowSlice:
    return RowSlice(row, begin, count, samples=True)


STEPS = [
    [(0, 0, 41), (1, 0, 1), (2, 0, 33)],
    [(0, 41, 29), (1, 1, 1), (2, 33, 1), (3, 0, 90)],
    [(0, 70, 1), (1, 2, 1), (3, 90, 1)],
]
"""(row, begin, tokens): prompts in chunks, and rows that decode beside them."""


@pytest.mark.parametrize("dtype", native.TYPE_CODES, ids=str)
@pytest.mark.parametrize("block_size", [16, 8, 5])
def test_attention(dtype: torch.dtype, block_size: int, library: Any) -> None:
    """Features in all combinations; dimensions that fit the vectors and such that do not. Slots that nobody
    wrote are NaN.
    """
    for (key_dim, value_dim), group, window, softcap, sinks in itertools.product(
        ((64, 64), (24, 18)), (1, 3), (None, 20), (None, 5.0), (None, torch.randn(6))
    ):
        torch.manual_seed(0)
        spec = AttentionSpec(2, group, window, key_dim**-0.5, softcap)
        geometries = [
            Geometry([LayerSpec(spec, key_dim, value_dim)], block_size, number)
            for number in (torch.float32, dtype)
        ]
        caches = [KVCache(geometry, BLOCKS, CPU) for geometry in geometries]
        caches[1].fill(list(range(BLOCKS + 1)), math.nan)
        backends = [SdpaBackend(geometries[0], CPU), CpuPagedBackend(geometries[1], library)]
        modules = [SimpleNamespace(keys=cache.keys[0], values=cache.values[0], spec=spec) for cache in caches]
        modules = [type("Module", (), vars(module))() for module in modules]
        lines = rows(block_size, (70, 1, 33, 90))
        for step in STEPS:
            line = build_inputs(
                arrange([chunk(lines[row], begin, count) for row, begin, count in step]), block_size, CPU
            )
            tokens = line.ids.shape[1]
            query = torch.randn(1, tokens, 2 * group, key_dim).to(dtype).transpose(1, 2)
            key, value = (
                torch.randn(1, 2, tokens, key_dim).to(dtype),
                torch.randn(1, tokens, 2, value_dim).to(dtype).transpose(1, 2),
            )
            outputs = []
            for backend, module, number in zip(backends, modules, (torch.float32, dtype), strict=True):
                backend.begin(line)  # type: ignore[attr-defined]
                given = [tensor.to(number) for tensor in (query, key, value)]
                outputs.append(backend.attend(module, *given, None if sinks is None else sinks[: 2 * group]))  # type: ignore[attr-defined]
            torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0, atol=ERRORS[dtype])


# --- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(96, 144, False), (50, 7, True), (64, 100, True)])
def test_products(
    dtype: torch.dtype, whole: bool, inputs: int, outputs: int, bias: bool, library: Any
) -> None:
    """A row's result is the same bits alone and among others; whole, it is as exact as float32."""
    if not library.tf_multiplies(native.TYPE_CODES[dtype]):
        pytest.skip("torch's products are used on this processor")
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    packed = NativeLinear(linear, library, whole, LargePages())
    for num_rows in (*range(1, 10), 33):
        states = torch.randn(1, num_rows, inputs).to(dtype)
        wanted = states.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        result = packed(states)
        torch.testing.assert_close(result.double(), wanted, rtol=2 * torch.finfo(result.dtype).eps, atol=1e-5)
        assert result.dtype == (torch.float32 if whole else dtype)
        assert all(torch.equal(packed(states[:, row]), result[:, row]) for row in range(num_rows))


@pytest.mark.parametrize(
    "rows",
    [torch.ones(2, 10), torch.ones(2, 6), torch.ones(2, 8, dtype=torch.bfloat16)],
    ids=["wide", "narrow", "type"],
)
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor, library: Any) -> None:
    """As torch does; nothing beyond them is read."""
    linear = nn.Linear(8, 8)
    packed = NativeLinear(linear, library, False, LargePages())
    for layer in (linear, packed):
        with pytest.raises(RuntimeError):
            layer(rows)


def test_wrong_products_are_not_used(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeLinear.product
    monkeypatch.setattr(
        NativeLinear,
        "product",
        lambda self, rows, biased: right(self, rows, biased) + 0.5 * (rows.shape[0] > 1),
    )
    monkeypatch.setattr(packed_linear, "multiplies_correctly", packed_linear.multiplies_correctly.__wrapped__)
    assert type(packed_linear.pack_linear(nn.Linear(8, 8), False, LargePages())) is not NativeLinear
    assert ("are wrong on this processor" in caplog.text) == bool(
        library.tf_multiplies(native.TYPE_CODES[torch.float32])
    )


# --- builds for other processors ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' code runs on x86-64 only")
@pytest.mark.parametrize(
    ("march", "kind"),
    [
        ("x86-64-v2", "split"),
        ("x86-64-v3", "split"),
        ("native", "plain"),
        ("native", "split"),
        ("native", "tiles"),
        ("native", "one thread"),
    ],
)
def test_other_builds(march: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Narrower vectors; bfloat16 multiplied in pairs, where this processor can, widened, or by a matrix unit;
    no OpenMP.
    """
    command = [
        word.replace("=native", f"={march}") for word in native.compile_command() if word != "-DSPLIT_PAIRS"
    ]
    command += {
        "split": ["-DSPLIT_PAIRS"],
        "tiles": ["-include", str(Path(__file__).parents[4] / "support/engine/fake_tiles.h")],
    }.get(kind, [])
    command = [word for word in command if kind != "one thread" or word not in native.openmp_flags()]
    command += (
        ["-fno-gnu-unique"] if "g++" in command[0] or command[0] == "c++" else []
    )  # several builds in one process
    monkeypatch.setattr(native, "CACHE", tmp_path)
    monkeypatch.setattr(native, "compile_command", lambda: command)
    built = native.library.__wrapped__()
    assert built and built.tf_multiplies(native.TYPE_CODES[torch.bfloat16]) == (march != "x86-64-v2")
    for dtype in native.TYPE_CODES:
        test_attention(dtype, 16, built)
        for size in (60, 3000):
            choice.test_kernels_choose_as_torch_does(size, dtype, built)
            choice.test_kernels_tell_what_torch_does(size, dtype, built)
        if built.tf_multiplies(native.TYPE_CODES[dtype]):
            for inputs, outputs, bias in ((50, 7, True), (96, 144, False), (64, 100, True)):
                test_products(dtype, True, inputs, outputs, bias, built)
                test_products(dtype, False, inputs, outputs, bias, built)


# --- whole layers -------------------------------------------------------------------------------------------


def num_fused(monkeypatch: pytest.MonkeyPatch, folder: Path, family: str, **sizes: float) -> int:
    if not native.library().tf_multiplies(native.TYPE_CODES[torch.float32]):  # type: ignore[union-attr]
        pytest.skip("torch's products are used on this processor")
    counts: list[int] = []
    monkeypatch.setattr(
        load, "fuse_layers", lambda *arguments: counts.append(fused_layer.fuse_layers(*arguments))
    )
    tiny_models.save(folder, FAMILIES[family][0], FAMILIES[family][1] | sizes)
    engine_of(folder)
    return counts[0]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("Llama", 3),
        ("Llama-dynamic", 3),
        ("Mistral", 3),
        ("Qwen2", 3),
        ("Qwen3", 3),
        ("SmolLM3", 3),
        ("Gemma2", 0),
        ("OLMo2", 0),
        ("Ministral3", 0),
    ],
)
def test_layers_taken_over(family: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_fused(monkeypatch, tmp_path, family) == wanted


def test_layers_that_look_at_positions_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However near they come on the trial inputs."""
    monkeypatch.setattr(fused_layer, "is_close", lambda *tensors: True)
    assert num_fused(monkeypatch, tmp_path / "far", "Ministral3") == 0
    assert num_fused(monkeypatch, tmp_path / "plain", "Llama") == 3


def test_other_sums_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_fused(monkeypatch, tmp_path, "Granite", residual_multiplier=0.95) == 0


def test_other_code_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parts, put together in another way."""
    import transformers.models.llama.modeling_llama as llama

    class Louder(llama.LlamaMLP):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) * 1.01  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(llama, "LlamaMLP", Louder)
    assert num_fused(monkeypatch, tmp_path, "Llama") == 0


@pytest.mark.parametrize(("between", "joined"), [(1, True), (2, False)])
def test_layers_are_joined_where_nothing_is_between(
    between: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Identity(), nn.Identity()
    taken = {first: lambda states: states * 3, second: lambda states: states + 5}
    for layer, way in taken.items():
        layer.forward = way  # type: ignore[method-assign]
    monkeypatch.setattr(
        fused_layer.FusedLayers, "joined", lambda parts: lambda states: parts[1](parts[0](states))
    )
    fused_layer.join_layers(taken, lambda: second(first(torch.ones(2)) * between))  # type: ignore[arg-type]
    assert (second.forward is fused_layer.pass_through) == joined == (first.forward is not taken[first])  # type: ignore[comparison-overlap]


def logprobs(engine: Engine, prefixes: dict[int, list[int]], prefill_tokens: int) -> dict[int, list[float]]:
    played = Player(
        engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens, until=engine.rows.step
    )
    played.run([played.start(row, ids, 20, ignore_eos=True) for row, ids in prefixes.items()])
    said: dict[int, list[float]] = {row: [] for row in prefixes}
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            said[row].append(logprob)
    return said


def test_same_bits_in_any_company(tmp_path: Path) -> None:
    """Alone, with others, in chunks."""
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    engine, rows_of = engine_of(tmp_path), dict(enumerate(prompts()))
    together = logprobs(engine, rows_of, 1000)
    assert logprobs(engine, rows_of, 7) == together
    assert {row: logprobs(engine, {row: prompt}, 1000)[row] for row, prompt in rows_of.items()} == together


# --- without a compiler -------------------------------------------------------------------------------------


def test_without_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said in one line, and the ids are the same."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    wanted = {row: tiny_models.generate(model, prompt, 40) for row, prompt in enumerate(prompts())}
    monkeypatch.setattr(native, "COMPILERS", ())
    monkeypatch.setattr(native, "library", native.functools.cache(native.library.__wrapped__))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path)
    assert [record.message for record in caplog.records if record.name == native.__name__] == [
        "no native kernels, torch's are used and are slower: no C++ compiler (g++ or clang++) is installed"
    ]
    assert isinstance(engine.loaded.backend, SdpaBackend) and isinstance(
        packed_linear.pack_linear(nn.Linear(8, 8), False, LargePages()), OneDnnLinear
    )
    assert play(engine, dict(enumerate(prompts()))) == wanted


def test_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder named; what fails leaves nothing behind."""
    monkeypatch.setattr(native, "CACHE", tmp_path)
    monkeypatch.setattr(native.subprocess, "run", calls := Recorded(native.subprocess.run))  # type: ignore[attr-defined]
    first = native.build_library()
    assert native.build_library() == first and calls.count == 3, "version, compilation, version"
    assert {path.name for path in tmp_path.iterdir()} == {first.name, "lock"}


class Recorded:
    def __init__(self, run: Any) -> None:
        self.run, self.count = run, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return self.run(*arguments, **options)
