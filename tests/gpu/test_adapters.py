"""LoRA adapters on CUDA: Triton's kernels, in compiled layers and captured steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters.tiny_adapters import COUNT, load_adapters, merged, play, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import (  # noqa: F401
    ANYWHERE,
    FLASH_FAMILIES,
    check_near,
    engine_on,
    needs_flash,
    noted,
    nothing_is_left,
)
from tests.support.engine.tiny_engine import prompts


@ANYWHERE
def test_rows_of_adapters_and_of_none_come_from_graphs_and_are_near_merged_models(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_flash(device)
    model = tiny_models.save(tmp_path / "model", *FLASH_FAMILIES["Llama"])
    folders = {name: save_adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab")}
    settings: dict[str, Any] = {"dtype": "bfloat16", "enable_lora": True, "max_loras": 2}
    engine = engine_on(device, tmp_path / "model", monkeypatch, **settings)
    load_adapters(engine, folders)
    rows = {number: (prompts()[number], name) for number, name in enumerate(("a", "b", "", "a"))}
    with noted(engine) as (_, replayed):
        ids = play(engine, rows)
    assert len(replayed) >= COUNT - 3, "steps with adapters are captured"
    for number, (prompt, name) in rows.items():
        own = merged(model, folders[name]) if name else model
        check_near(own, {number: prompt}, ids, f"adapter {name!r}")
