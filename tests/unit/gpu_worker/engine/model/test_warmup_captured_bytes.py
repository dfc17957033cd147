"""Memory that captured steps keep is measured while the cache has no blocks yet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings.settings import Settings
from gpu_worker.engine.cuda.graphs import graph_sizes
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.warmup import max_captured_tokens
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import again
from tests.support.engine.tiny_models import FAMILIES

AMPERE = 8
PEAK_BYTES = 12_345
MAX_ROWS = 3
SIZES = graph_sizes(MAX_ROWS, max_captured_tokens(MAX_ROWS))


def test_plans_and_logits_of_all_sizes_are_made_while_memory_is_measured(
    tmp_path: Path, like_cuda: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size is computed once, the largest first; plans stay, and captures use them. On a card whose plans
    the host makes.
    """
    tiny_models.save(tmp_path, *FAMILIES["Mistral"])
    engine, computed = like_cuda(tmp_path, generation=AMPERE), list[int]()
    loaded = engine.loaded
    loaded.adapters = None  # as on CUDA without LORA_ADAPTERS
    plans: Any = loaded.backend.decode_plans  # type: ignore[attr-defined]
    plans.wrappers.clear()
    num_blocks = loaded.cache.num_blocks
    loaded.attach(0)
    decode = type(loaded).decode

    def note(own: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(ids.shape[1])
        return decode(own, ids, *rest)

    def measure(device: torch.device, run: Callable[[], object]) -> int:
        run()
        return PEAK_BYTES

    monkeypatch.setattr(type(loaded), "decode", note)
    monkeypatch.setattr(warmup, "measure_peak", measure)
    assert warmup.captured_bytes(loaded, Settings(max_batch_size=MAX_ROWS)) == PEAK_BYTES
    assert computed == SIZES[::-1] and sorted(plans.wrappers) == SIZES
    made = dict(plans.wrappers)
    loaded.attach(num_blocks)
    engine.capture(again, MAX_ROWS, False)
    assert all(plans.wrappers[size] is made[size] for size in SIZES)


def test_steps_that_are_not_captured_keep_nothing(tmp_path: Path, like_cuda: Callable[..., Engine]) -> None:
    """With ENFORCE_EAGER, or frequencies that depend on each length."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    loaded = like_cuda(tmp_path).loaded
    assert warmup.captured_bytes(loaded, Settings(enforce_eager=True)) == 0
    loaded.backend.capturable = False
    assert warmup.captured_bytes(loaded, Settings()) == 0
