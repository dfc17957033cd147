"""Rows with pictures in captured steps, on CPU: FlashInfer's attention is computed by torch, and a graph is
captured by calling again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.engine.engine import Engine
from tests.support.engine.pictures.models import SettledEngine
from tests.support.engine.pictures.seeing import Seeing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL"])
def test_positions_after_pictures_in_captured_steps(
    name: str, tmp_path: Path, like_cuda: Callable[..., Engine]
) -> None:
    seeing = Seeing(tmp_path, name)
    engine = like_cuda(tmp_path)
    assert engine.graphs and engine.ready.pictures
    seeing.engine = SettledEngine(engine)
    assert seeing.play(seeing.prompts) == seeing.answers
    assert seeing.play(seeing.prompts, prefill_tokens=7) == seeing.answers
