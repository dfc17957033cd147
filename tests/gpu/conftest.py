import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.cuda.graphs import CudaGraphs
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import FLASH_FAMILIES, engine_on, needs_flash


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test begins without compiled code, and gives the GPU's memory back."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture
def flash(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Engine]]:
    """Makes an engine in bfloat16 of a tiny model, with captured steps → transformers' own model, and it."""
    needs_flash(device)

    def make(
        family: tuple[str, dict[str, Any]] = FLASH_FAMILIES["Llama"], **settings: Any
    ) -> tuple[Any, Engine]:
        model = tiny_models.save(tmp_path, *family)
        engine = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16", **settings)
        assert isinstance(engine.graphs, CudaGraphs)
        return model, engine

    return make
