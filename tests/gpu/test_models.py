"""Models with adapters, with pictures and with states on CUDA, from compiled layers and captured steps: their
ids are near those of transformers' forward in float32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters.tiny_adapters import COUNT, load_adapters, merged, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import (
    ANYWHERE,
    FAR,
    FLASH_FAMILIES,
    HEADS,
    check_near,
    distances,
    each,
    engine_on,
    needs_flash,
    noted,
)
from tests.support.engine.pictures.models import NEW_TOKENS, SettledEngine, prompts_of, save
from tests.support.engine.tiny_engine import play, prompts
from tests.support.engine.tiny_models import HYBRIDS, rope


@ANYWHERE
def test_rows_of_adapters_and_of_none_come_from_graphs_and_are_near_merged_models(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_flash(device)
    model = tiny_models.save(tmp_path / "model", *FLASH_FAMILIES["Llama"])
    folders = {name: save_adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab")}
    settings: dict[str, Any] = {"dtype": "bfloat16", "enable_lora": True, "max_loras": 2}
    engine = engine_on(device, tmp_path / "model", monkeypatch, **settings)
    assert all(layer._compiled_call_impl for layer in engine.loaded.model.model.layers)
    load_adapters(engine, folders)
    names = ("a", "b", "", "a")
    params = {number: {"adapter": name} for number, name in enumerate(names)}
    with noted(engine) as (_, replayed):
        ids = play(engine, dict(enumerate(prompts())), new_tokens=COUNT, params=params)
    assert len(replayed) >= COUNT - 3, "steps with adapters are captured"
    for number, (prompt, name) in enumerate(zip(prompts(), names, strict=True)):
        own = merged(model, folders[name]) if name else model
        check_near(own, {number: prompt}, ids, f"adapter {name!r}")


# --- pictures -----------------------------------------------------------------------------------------------

ROPES = {"Qwen2.5-VL": rope("default", mrope_section=[8, 12, 12])}


@each("name", ["SmolVLM", "Qwen2.5-VL"])
def test_ids_with_pictures_are_near_those_of_float32(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towers run on the device; rows decode in captured steps, by positions that pictures have shifted."""
    needs_flash(device)
    model = save(tmp_path, name, HEADS | ROPES.get(name, {}))
    engine = engine_on(device, tmp_path, monkeypatch, dtype="bfloat16")
    assert engine.ready.pictures and engine.graphs
    seen = prompts_of(model)
    params = {row: {"pictures": prompt.pictures} for row, prompt in seen.items()}
    rows = {row: prompt.ids for row, prompt in seen.items()}
    ids = play(SettledEngine(engine), rows, 20, new_tokens=NEW_TOKENS, params=params)
    for row, prompt in seen.items():
        with torch.inference_mode():
            far = distances(lambda seen, own=prompt: model.forward(own, seen), prompt.ids, ids[row])
        assert far.max() < FAR, f"row {row}"


# --- states -------------------------------------------------------------------------------------------------

FAMILIES = ("LFM2", "Mamba2", "Granite4", "Qwen3-Next", "Jamba")
"""LFM2 and Granite 4 have heads of 16 numbers, which FlashInfer pads."""


@each("family", FAMILIES)
def test_ids_are_near_those_of_float32(device: str, family: str, flash: Callable[..., Any]) -> None:
    """In bfloat16, with compiled layers and steps from graphs."""
    (model, engine), fresh = flash(HYBRIDS[family]), dict(enumerate(prompts()))
    assert engine.graphs
    with noted(engine) as (_, replayed):
        check_near(model, fresh, play(engine, fresh), "batched")
    assert replayed
    check_near(model, fresh, play(engine, fresh, prefill_tokens=7), "chunked")
