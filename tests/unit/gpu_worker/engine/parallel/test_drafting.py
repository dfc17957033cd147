"""Two ranks with a draft model: one drafts, and both check the same proposals."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import multi_rank_engine, tiny_models
from tests.support.engine.multi_rank_engine import Led
from tests.support.engine.tiny_models import FAMILIES
from tests.support.speculation.drafts import drafting_engine, engine_settings, play_rows


@pytest.fixture(scope="module")
def two() -> Iterator[Communicator]:
    with multi_rank_engine.running(2) as ranks:
        yield ranks


@pytest.mark.slow
def test_both_ranks_check_the_drafts_of_one(two: Communicator, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    expected = play_rows(drafting_engine(tmp_path, None))
    speculative = {"model": str(tmp_path), "num_speculative_tokens": 4}
    with Led(two, **engine_settings(tmp_path, speculative, max_batch_size=4)) as engine:
        drafted = play_rows(engine, lead=64)
    assert drafted.ids == expected.ids
    assert drafted.num_proposed > 20 and drafted.share_right > 0.9
