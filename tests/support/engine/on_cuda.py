"""The engine as it is on CUDA: on a GPU, or on CPU with what stands in for the parts of it that need one.

Tests take a `device` of `DEVICES`. On CPU they are slow ones: they prove that the test itself is sound, and
pass where there is no GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.model_files import no_progress
from common.settings.settings import Settings
from gpu_worker.engine import engine as engines
from gpu_worker.engine.attention.backend import Geometry
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.row import StepSlices
from gpu_worker.engine.cuda.graphs import CudaGraphs
from gpu_worker.engine.cuda.linear import fuse_linears
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import load, passes, warmup
from gpu_worker.engine.model.quantized_linears import quantise_linears
from gpu_worker.engine.quantization.blocks import FindBlocks
from tests.support.engine import fake_products
from tests.support.engine.fake_flashinfer import install
from tests.support.engine.tiny_models import FAMILIES, LLAMA

install()
HOPPER = 9
ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(600),  # FlashInfer compiles a kernel when it is first used
)
ON_CPU = (
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the same test runs on the GPU"),
)
DEVICES = [pytest.param("cuda", marks=ON_CUDA), pytest.param("cpu", marks=ON_CPU)]
ANYWHERE, ON_GPUS = (pytest.mark.parametrize("device", devices) for devices in (DEVICES, DEVICES[:1]))


def each(parameter: str, values: Sequence[str], slow: Sequence[str] = ()) -> pytest.MarkDecorator:
    """All values of a parameter on a GPU, some of them in the slow run only; the first of them on CPU."""
    marks = {value: (*ON_CUDA, pytest.mark.slow) if value in slow else ON_CUDA for value in values}
    devices = [pytest.param("cuda", value, marks=marks[value]) for value in values]
    return pytest.mark.parametrize(
        ("device", parameter), [*devices, pytest.param("cpu", values[0], marks=ON_CPU)]
    )


HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
"""FlashInfer has kernels for this; it compiles them once for all models with the same group, and for SmolLM2.
"""
FLASH_FAMILIES = {
    name: (FAMILIES[name][0], FAMILIES[name][1] | HEADS) for name in ("Qwen2", "gpt-oss", "Gemma2")
}
FLASH_FAMILIES["Llama"] = ("Llama", LLAMA | HEADS)
FLASH_FAMILIES["DeepSeek-V3"] = (
    "DeepseekV3",
    FAMILIES["DeepSeek-V3"][1] | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 3},
)
FLASH_FAMILIES["gpt-oss"][1]["num_local_experts"] = (
    2  # all of them: a choice between two that are nearly alike would hide other errors
)
SETTINGS: dict[str, Any] = {
    "kv_cache_bytes": 2**26,
    "max_batch_prefill_tokens": 128,
    "max_batch_size": 6,
    "block_size": 16,
    "debug_kv": True,
    "enable_lora": False,
    "threads": 2,
}

FAR, MEAN = 1.5, 0.15
"""Of the standard deviation of a position's logits: how far below the largest one, in a float32 forward,
tokens may lie that bfloat16 chose; the farthest, and all of a row on average. Measured on CPU: 0.8 and 0.08
at most. A token that was computed wrongly lies some 3 below.
"""


def again(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a capture."""
    run()
    return run


def used_bytes() -> int:
    """Of the whole GPU, by everybody."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def needs_flash(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


def backend_of(geometry: Geometry, device: torch.device, max_rows: int, max_blocks: int) -> Any:
    """As on CUDA."""
    from gpu_worker.engine.attention.flashinfer import FlashInferBackend
    from gpu_worker.engine.attention.flashinfer_support import unsupported_because

    return (
        SdpaBackend(geometry, device)
        if unsupported_because(geometry)
        else FlashInferBackend(geometry, device, HOPPER, max_rows, max_blocks)
    )


def engine_on(device: str, folder: Path | str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """With all that an engine on CUDA does: merged products, compiled layers, captured steps where the
    backend has them, a step ahead.
    """
    chosen = Settings(model_id=str(folder), device=device, **SETTINGS | settings)  # type: ignore[arg-type]
    if device == "cuda":
        return Engine(chosen)
    fake_products.install(monkeypatch)
    monkeypatch.setattr(passes, "pack_linears", as_on_cuda)
    monkeypatch.setattr(load, "choose_backend", backend_of)
    monkeypatch.setattr(engines, "make_capture", lambda device: again)
    if chosen.deterministic:
        monkeypatch.setattr(load, "nondeterministic_because", lambda *arguments: "")
        monkeypatch.setattr(warmup, "FIXED_TOKENS", 12)
    engine = Engine(chosen)
    engine.runs_ahead = True
    engine.compile_and_capture(no_progress)
    return engine


def as_on_cuda(model: Any, find: FindBlocks, rounds: bool) -> None:
    quantise_linears(model, find, torch.device("cpu"))
    fuse_linears(model)


# --- what is near enough ------------------------------------------------------------------------------------


@torch.inference_mode()
def distances(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """How far each of the new ids lies below the likeliest in `model`'s forward over all of them, in standard
    deviations of the logits.
    """
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    below = logits.amax(-1) - logits.gather(1, torch.tensor([list(ids)]).T)[:, 0]
    return below / logits.std(-1)  # type: ignore[no-any-return]


def check_near(model: Any, prefixes: dict[int, list[int]], played: dict[int, list[int]], how: str) -> None:
    """`prefixes`: what each row began with."""
    for row, prefix in prefixes.items():
        assert played[row]
        found = distances(model, prefix, played[row])
        assert found.max() < FAR and found.mean() < MEAN, f"row {row}, {how}: {found.tolist()}"


# --- what an engine does ------------------------------------------------------------------------------------


@contextmanager
def noted(engine: Engine) -> Iterator[tuple[list[bool], list[int]]]:
    """Of the forwards made meanwhile: whether all rows decoded; and the numbers of rows of those that were
    graphs.
    """
    computed, replayed = list[bool](), list[int]()
    compute, graphs = engine.forward, engine.graphs if isinstance(engine.graphs, CudaGraphs) else None
    run = graphs.run if graphs else None

    def note(slices: StepSlices, previous: torch.Tensor | None = None) -> torch.Tensor:
        computed.append(all(row_slice.decodes for row_slice in slices))
        return compute(slices, previous)

    def note_replay(slices: StepSlices, previous: torch.Tensor | None) -> torch.Tensor:
        assert run
        replayed.append(len(slices))
        return run(slices, previous)

    engine.forward = note  # type: ignore[method-assign]
    if graphs:
        graphs.run = note_replay  # type: ignore[method-assign]
    try:
        yield computed, replayed
    finally:
        del engine.forward
        if graphs:
            del graphs.run
