"""An engine that sleeps has no cache, and goes on as before when it wakes."""

from pathlib import Path

import pytest

from tests.support.engine.tiny_engine import engine_of, play, prompts
from tests.support.engine.tiny_models import FAMILIES, save


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_an_engine_wakes_as_it_fell_asleep(tmp_path: Path, family: str) -> None:
    save(tmp_path, *FAMILIES[family])
    engine = engine_of(tmp_path)
    rows = dict(enumerate(prompts()))
    expected, num_blocks = play(engine, rows), engine.ready.num_blocks
    engine.sleep()
    assert engine.loaded.cache.num_blocks == 0
    assert engine.wake_up(print).num_blocks == num_blocks == engine.loaded.cache.num_blocks
    later = {row + len(rows): ids for row, ids in rows.items()}
    assert [*play(engine, later).values()] == [*expected.values()]
