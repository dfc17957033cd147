"""Workers whose model is in stages, in a whole fleet: when a process of a worker dies, that worker alone
ends, and no token is lost or computed in another way.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import tiny_models
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, interrupt_worker

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 100
STREAMS = 6
VOCAB = 49_152
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "32MiB",
    "worker_ttl_s": 3,
    "step_timeout_s": 2,
    "threads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    sizes = tiny_models.LLAMA | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    return tiny_models.save_with_tokenizer(folder, "Llama", sizes | {"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    with Fleet(pipeline_parallel_size=2, num_workers=1, model_id=model, **SETTINGS) as fleet:
        yield fleet


async def undisturbed(fleet: Fleet) -> list[list[int]]:
    return await Load(fleet, MAX_NEW_TOKENS, STREAMS).whole()


async def interrupted(fleet: Fleet, number: int, sent: int) -> list[list[int]]:
    return await interrupt_worker(fleet, number, sent, MAX_NEW_TOKENS, STREAMS)


async def test_a_stage_that_is_killed_costs_no_token(fleet: Fleet) -> None:
    expected = await undisturbed(fleet)
    assert await interrupted(fleet, 2, signal.SIGKILL) == expected


@pytest.mark.parametrize(
    ("number", "sent"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
async def test_a_process_that_dies_or_stops_costs_no_token(fleet: Fleet, number: int, sent: int) -> None:
    expected = await undisturbed(fleet)
    assert await interrupted(fleet, number, sent) == expected


async def test_only_the_worker_of_a_dead_stage_ends(model: Path) -> None:
    """Its rows resume on the other worker."""
    with Fleet(pipeline_parallel_size=2, num_workers=2, model_id=model, **SETTINGS) as fleet:
        expected = await undisturbed(fleet)
        other = fleet.pid("w1")
        assert await interrupted(fleet, 2, signal.SIGKILL) == expected
        assert fleet.pid("w1") == other


async def test_stages_of_two_ranks_each(model: Path, fleet: Fleet) -> None:
    """The ids of stages of one rank; a dead rank costs none of them."""
    expected = await undisturbed(fleet)
    with Fleet(pipeline_parallel_size=2, num_shard=2, num_workers=1, model_id=model, **SETTINGS) as both:
        ranks = both.engines("w0")
        assert len(ranks) == 4
        assert await undisturbed(both) == expected
