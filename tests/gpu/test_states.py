"""Models with states on CUDA: their ids, from captured steps too."""

from pathlib import Path

import pytest

from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import (  # noqa: F401
    check_near,
    each,
    engine_on,
    needs_flash,
    noted,
    nothing_is_left,
)
from tests.support.engine.tiny_engine import play, prompts
from tests.support.states.hybrid_models import HYBRIDS

FAMILIES = ("LFM2", "Mamba2", "Granite4", "Qwen3-Next", "Jamba")
"""LFM2 and Granite 4 have heads of 16 numbers, which FlashInfer pads."""


@each("family", FAMILIES)
def test_ids_are_near_those_of_float32(
    device: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with compiled layers and steps from graphs."""
    needs_flash(device)
    model = tiny_models.save(tmp_path, *HYBRIDS[family])
    engine, fresh = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16"), dict(enumerate(prompts()))
    assert engine.graphs
    with noted(engine) as (_, replayed):
        check_near(model, fresh, play(engine, fresh), "batched")
    assert replayed
    check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
