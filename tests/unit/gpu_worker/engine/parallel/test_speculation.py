"""Speculation on several ranks: the ids of one rank that does not speculate."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from tests.support.engine import multi_rank_engine, tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.multi_rank_engine import Led
from tests.support.engine.tiny_engine import NEW_TOKENS, prompts
from tests.support.engine.tiny_models import FAMILIES

GREEDY = SamplingParams(allowed_token_ids=[5, 6, 7])
"""With three tokens to choose from, many proposals are right, and many are wrong."""


@pytest.fixture(scope="module")
def two() -> Iterator[Communicator]:
    with multi_rank_engine.running(2) as ranks:
        yield ranks


def play(engine: Any, sampling: SamplingParams) -> Player:
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
    rows = enumerate(prompts())
    played.run([played.start(row, ids, NEW_TOKENS, ignore_eos=True, sampling=sampling) for row, ids in rows])
    return played


@pytest.mark.slow
def test_ranks_propose_and_confirm_the_same(two: Communicator, tmp_path: Path) -> None:
    """From the ids that rank 0 samples, greedy and seeded."""
    tiny_models.save(tmp_path, *FAMILIES["Llama"])
    settings: dict[str, Any] = {
        "model_id": str(tmp_path),
        "dtype": "float32",
        "kv_cache_bytes": 2**23,
        "max_batch_prefill_tokens": 64,
        "block_size": 8,
        "debug_kv": True,
        "threads": 1,
    }
    samplings = (GREEDY, replace(GREEDY, temperature=1.0, seed=7))
    alone = Engine(Settings(**settings))
    with Led(two, speculate=3, **settings) as engine:
        for sampling in samplings:
            expected, played = play(alone, sampling), play(engine, sampling)
            assert played.ids == expected.ids
            assert sum(step.proposed_tokens for step in played.steps) > 20
            assert len(played.steps) < len(expected.steps)
