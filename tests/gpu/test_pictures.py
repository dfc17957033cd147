"""Pictures on CUDA: ids are near those of transformers' forward with the same pictures."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.batch_player import Player
from tests.support.engine.on_cuda import (  # noqa: F401
    FAR,
    HEADS,
    distances,
    each,
    engine_on,
    needs_flash,
    nothing_is_left,
)
from tests.support.engine.pictures.models import SettledEngine, save
from tests.support.engine.pictures.seeing import NEW_TOKENS, prompts_of
from tests.support.engine.tiny_models import rope

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
    free = list(range(1, 1 + engine.ready.num_blocks))
    settled: Any = SettledEngine(engine)
    player, prompts = Player(settled, free, 20, until=engine.rows.step), prompts_of(model)
    ids = player.run(
        [
            player.start(row, prompt.ids, NEW_TOKENS, pictures=prompt.pictures, ignore_eos=True)
            for row, prompt in prompts.items()
        ]
    )
    for row, prompt in prompts.items():
        with torch.inference_mode():
            far = distances(lambda seen, own=prompt: model.forward(own, seen), prompt.ids, ids[row])
        assert far.max() < FAR, f"row {row}"
