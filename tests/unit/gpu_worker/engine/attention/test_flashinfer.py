"""The parts of the engine that CUDA runs, on CPU: FlashInfer's attention is computed by torch, and graphs are
captured by calling again.
"""

import itertools
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.messages.request import SamplingParams
from common.settings.settings import SettingError, Settings
from gpu_worker.engine import engine as engine_module
from gpu_worker.engine.attention import backend as attention
from gpu_worker.engine.attention import choose
from gpu_worker.engine.attention.flashinfer_support import (
    add_ninja_to_path,
    plans_needed_because,
    unsupported_because,
)
from gpu_worker.engine.attention.kv_cache import AttentionSpec, Geometry, KVCache, LayerSpec
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.inputs import build_inputs
from gpu_worker.engine.batch.row import arrange
from gpu_worker.engine.cuda.compile import compile_layers, layers_of, stop_compiling
from gpu_worker.engine.cuda.deterministic import FixedShapeGraph
from gpu_worker.engine.cuda.fused_linear import FusedLinearSlice, fuse_linears
from gpu_worker.engine.cuda.graphs import CudaGraphs, graph_sizes, run_without_sync
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load, warmup
from tests.support.engine import fake_flashinfer, tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_models import FAMILIES, VOCAB
from tests.unit.gpu_worker.engine.cpu.test_native import BLOCKS, CPU, STEPS, chunk, rows
from tests.unit.gpu_worker.engine.model.test_families import NEW_TOKENS, engine_of, play, prompts
from tests.unit.gpu_worker.engine.test_split_step import limit

if not fake_flashinfer.install():
    pytest.skip("where there is a GPU, the tests marked gpu try the real parts", allow_module_level=True)
from gpu_worker.engine.attention.flashinfer import FlashInferBackend

HOPPER = 9
SLOWLY = (
    "Llama",
    "Mistral",
    "Gemma2",
    "Qwen3-MoE",
    "GPT2",
    "Llama-dynamic",
    "Llama-longrope",
    "Gemma3-longrope",
)


@pytest.mark.parametrize(("block_size", "generation"), [(16, HOPPER), (5, HOPPER), (16, 8)])
def test_attention(block_size: int, generation: int) -> None:
    """Against torch's, in all combinations; slots that nobody wrote are NaN."""
    for window, softcap, sinks in itertools.product((None, 20), (None, 5.0), (None, torch.randn(6))):
        group = 3 if window else 1
        torch.manual_seed(0)
        geometry = Geometry(
            [LayerSpec(AttentionSpec(2, group, window, 0.2, softcap), 64, 64)], block_size, torch.float32
        )
        backends = [SdpaBackend(geometry, CPU), FlashInferBackend(geometry, CPU, generation)]
        assert backends[1].plan_free == (block_size == 16 and generation == HOPPER and softcap is None)  # type: ignore[attr-defined]
        caches = [KVCache(geometry, BLOCKS, CPU) for _ in backends]
        caches[1].fill(list(range(BLOCKS + 1)), math.nan)
        modules = [SimpleNamespace() for _ in caches]
        for module, cache, backend in zip(modules, caches, backends, strict=True):
            attention.attach([module], geometry, cache, backend)  # type: ignore[arg-type]
        lines = rows(block_size, (70, 1, 33, 90))
        for step in STEPS:
            line = build_inputs(
                arrange([chunk(lines[row], begin, count) for row, begin, count in step]), block_size, CPU
            )
            tokens = line.ids.shape[1]
            query = torch.randn(1, tokens, 2 * group, 64).transpose(1, 2)
            key, value = torch.randn(1, 2, tokens, 64), torch.randn(1, tokens, 2, 64).transpose(1, 2)
            outputs = []
            for backend, module in zip(backends, modules, strict=True):
                backend.begin(line)  # type: ignore[attr-defined]
                outputs.append(
                    backend.attend(module, query, key, value, None if sinks is None else sinks[: 2 * group])  # type: ignore[attr-defined]
                )
            torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("dims", "dtype", "why"),
    [
        ((128, 128), torch.bfloat16, ""),
        ((256, 256), torch.float16, ""),
        ((128, 128), torch.float32, "not for torch.float32"),
        ((192, 128), torch.bfloat16, "these have 128, 192"),
        ((80, 80), torch.float16, "these have 80"),
    ],
)
def test_what_it_lacks(
    dims: tuple[int, int],
    dtype: torch.dtype,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    geometry = Geometry([LayerSpec(AttentionSpec(2, 1, None, 1.0), *dims)], 64, dtype)
    found = unsupported_because(geometry)
    assert why in found and bool(found) == bool(why)
    monkeypatch.setattr(choose, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (HOPPER, 0))
    assert (
        isinstance(choose.choose_cuda_backend(geometry, CPU), SdpaBackend if why else FlashInferBackend)
        and found in caplog.text
    )


@pytest.mark.parametrize(
    ("group", "softcap", "block_size", "generation", "why"),
    [
        (32, None, 64, HOPPER, ""),
        (71, None, 64, HOPPER, "71 query heads"),
        (1, 30.0, 64, HOPPER, "soft-capped"),
        (1, None, 48, HOPPER, "48 tokens (BLOCK_SIZE)"),
        (1, None, 64, 8, "capability is 8"),
    ],
)
def test_what_needs_plans(
    group: int,
    softcap: float | None,
    block_size: int,
    generation: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    geometry = Geometry(
        [LayerSpec(AttentionSpec(2, group, None, 1.0, softcap), 64, 64)], block_size, torch.bfloat16
    )
    found = plans_needed_because(geometry, generation)
    assert why in found and bool(found) == bool(why)
    assert FlashInferBackend(geometry, CPU, generation).plan_free == (not why) and found in caplog.text


def test_ninja_is_found_where_no_environment_was_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    program = tmp_path / "scripts/ninja"
    program.parent.mkdir()
    program.touch(0o755)
    for _ in range(2):
        add_ninja_to_path()
        assert shutil.which("ninja") == str(program)
    assert os.environ["PATH"] == f"{tmp_path}/bin:{tmp_path}/scripts", "once"


# --- the whole engine ---------------------------------------------------------------------------------------


def again(run: Callable[[], None]) -> Callable[[], None]:
    """Captures by calling again."""
    run()
    return run


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on CPU made as one on CUDA is, but for the compiler."""

    def backend_of(geometry: Geometry, device: torch.device) -> FlashInferBackend:
        return FlashInferBackend(geometry, device, HOPPER)

    def made(folder: Path, deterministic: bool = False) -> Engine:
        monkeypatch.setattr(load, "pack_linears", fuse_linears)
        monkeypatch.setattr(load, "choose_backend", backend_of)
        monkeypatch.setattr(engine_module, "FIXED_TOKENS", 12)
        engine = engine_of(folder, block_size=16)
        engine.runs_ahead = True
        if engine.loaded.plan_free:
            engine.capture(again, 3, deterministic)
        return engine

    return made


@pytest.mark.parametrize(
    "family",
    ["Qwen2", "gpt-oss", "Phi3-longrope", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)],
)
def test_served(family: str, tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    """Steps of one to three rows that decode come from graphs, one of which is never full; others do not."""
    model = tiny_models.save(tmp_path, *FAMILIES[family])
    wanted = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    engine, fresh = like_cuda(tmp_path), dict(enumerate(prompts()))
    assert [play(engine, {row: prompt})[row] for row, prompt in fresh.items()] == list(wanted.values()), (
        "alone"
    )
    assert play(engine, fresh) == wanted, "batched"
    assert play(engine, fresh, prefill_tokens=7) == wanted, "chunked"
    resumed = play(engine, {row: prompt + wanted[row][:9] for row, prompt in fresh.items()}, base=9)
    assert resumed == {row: ids[9:] for row, ids in wanted.items()}, "resumed"


def test_decoding_comes_from_graphs(tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, seen = like_cuda(tmp_path), list[int]()
    assert isinstance(engine.graphs, CudaGraphs)
    graphs = {
        size: (lambda run=run, size=size: (seen.append(size), run()))  # type: ignore[func-returns-value]
        for size, run in engine.graphs.graphs.items()
    }
    engine.graphs.graphs = graphs  # type: ignore[assignment]
    play(engine, dict(enumerate(prompts()[:2])))
    assert list(graphs) == [1, 2, 3] and seen == [2] * (NEW_TOKENS - 1)


def test_what_waits_for_the_device_is_not_captured(
    tmp_path: Path,
    like_cuda: Callable[[Path], Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch raises where it would wait, before anything is captured."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, fresh, modes = like_cuda(tmp_path), dict(enumerate(prompts())), list[str]()
    wanted, engine.graphs = play(engine, fresh), None

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        def wait() -> None:
            run()
            assert modes == ["error"]
            raise RuntimeError("called a synchronizing CUDA operation\nand so on")

        run_without_sync(wait)
        return run

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(engine_module, "make_capture", lambda device: capture)
    engine.try_to_capture(Settings(max_batch_size=3))
    assert (
        engine.graphs is None
        and "captured: called a synchronizing CUDA operation;" in caplog.text
        and play(engine, fresh) == wanted
    )
    assert modes == ["error", "default"]
    modes.clear()
    with pytest.raises(SettingError, match="cannot be captured"):
        engine.try_to_capture(Settings(deterministic=True))


def test_halves_of_a_step_may_be_graphs(tmp_path: Path, like_cuda: Callable[[Path], Engine]) -> None:
    """A step with a chunk does not fit into memory; its rows that decode come from graphs, all of which write
    the same logits.
    """
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    engine, fresh = like_cuda(tmp_path), dict(enumerate(prompts()))
    wanted = play(engine, fresh, prefill_tokens=7)
    scarce = limit(engine, room=2, since=1, error=torch.OutOfMemoryError("CUDA out of memory"))
    assert play(engine, fresh, prefill_tokens=7) == wanted and scarce.refusals


def bits(
    engine: Engine, rows: list[int], prefill_tokens: int, shown: dict[int, list[int]]
) -> dict[int, tuple[list[int], bytes]]:
    """The ids of rows that draw, and the bits of their log-probabilities."""
    played = Player(
        engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens, until=engine.rows.step
    )
    sampling = [
        None,
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=4),
        None,
    ]
    asked = {
        row: {"base": len(shown.get(row, [])), "ignore_eos": True, "sampling": sampling[row]} for row in rows
    }
    starts = [
        played.start(row, prompts()[row] + shown.get(row, []), NEW_TOKENS, **asked[row])  # type: ignore[arg-type]
        for row in rows
    ]
    ids, told = played.run(starts), dict.fromkeys(rows, b"")
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            told[row] += np.float32(logprob).tobytes()
    return {row: (ids[row], told[row]) for row in rows}


def test_deterministic(tmp_path: Path, like_cuda: Callable[..., Engine]) -> None:
    """Everything goes through one graph, in lots that rows and chunks do not fit: ids are right, and bits a
    row's own.
    """
    model = tiny_models.save(tmp_path, *FAMILIES["Qwen2"])
    engine, rows = like_cuda(tmp_path, deterministic=True), list(range(len(prompts())))
    assert isinstance(engine.graphs, FixedShapeGraph) and list(engine.graphs.graphs.graphs) == [12]
    alone = {row: bits(engine, [row], 1000, {})[row] for row in rows}
    assert alone[0][0] == tiny_models.generate(model, prompts()[0], NEW_TOKENS)
    assert bits(engine, rows, 1000, {}) == alone, "batched"
    assert bits(engine, rows[::-1], 7, {}) == alone, "chunked, in another order"
    resumed = bits(engine, rows, 1000, {row: alone[row][0][: 5 + row] for row in rows})
    assert resumed == {row: (ids[5 + row :], told[4 * (5 + row) :]) for row, (ids, told) in alone.items()}, (
        "resumed"
    )


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(3) == [1, 2, 3] and graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-3:] == [240, 248, 256] and len(graph_sizes(256)) == 35


# --- weights ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Calls q after k, and v with another input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size) for size in (6, 4, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.k_proj(rows), self.q_proj(rows), self.v_proj(2 * rows), self.k_proj(rows)), -1)


def test_merged_products_are_what_the_parts_would_be() -> None:
    model, given = Odd(), torch.randn(3, 8)
    expected = model(given)
    fuse_linears(model)
    assert isinstance(model.q_proj, FusedLinearSlice)
    for _ in range(2):
        torch.testing.assert_close(model(given), expected)


def test_what_is_changed_or_unlike_is_not_merged() -> None:
    model = Odd()
    model.v_proj = nn.Linear(8, 4, bias=False)
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear
    model = Odd()
    model.v_proj.forward = model.v_proj.forward  # type: ignore[method-assign]
    fuse_linears(model)
    assert type(model.q_proj) is nn.Linear


# --- the compiler -------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.slow
def test_one_compilation_serves_all_layers(
    tmp_path: Path, like_cuda: Callable[[Path], Engine], dynamo: Any
) -> None:
    """One for one token, one for any number; and the ids are the same."""
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])
    wanted = {row: tiny_models.generate(model, prompt, NEW_TOKENS) for row, prompt in enumerate(prompts())}
    engine = like_cuda(tmp_path)
    engine.graphs = None

    def try_out() -> None:
        warmup.run_all_shapes(engine.forward, VOCAB, engine.block_size)

    assert compile_layers(engine.loaded.model, engine.loaded.attentions, try_out) == 3
    stop_compiling()
    compiled = dynamo["stats"]["unique_graphs"]
    assert 1 <= compiled <= 3 and not dynamo["graph_break"]
    assert play(engine, dict(enumerate(prompts()))) == wanted
    assert dynamo["stats"]["unique_graphs"] == compiled


def test_where_nothing_compiles_layers_run_as_they_are(
    tmp_path: Path, dynamo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_models.save(tmp_path, *FAMILIES["Llama"])

    def fail() -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    assert compile_layers(model, attentions, fail) == 0 and "no compiler" in caplog.text
    assert all(layer._compiled_call_impl is None for layer in layers_of(model, attentions))
