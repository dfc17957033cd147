"""Workers of two ranks in a whole fleet: they give the ids of one rank, and when one process dies or stops,
the whole worker ends.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import stream
from common.broker.keys import Keys
from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids, reference_ids
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, interrupt_worker
from tests.support.prompts import FEW, PROMPTS

MAX_NEW_TOKENS = 100
NEW_TOKENS = 40
STREAMS = 3
KEYS = Keys("default")
STEP_TIMEOUT_S = 2
VOCAB = 49_152
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "32MiB",
    "worker_ttl_s": 3,
    "threads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model: only its processes are slow."""
    return save_model(tmp_path_factory.mktemp("model"), "Llama", tiny_models.LLAMA)


def save_model(folder: Path, family: str, sizes: dict[str, Any]) -> Path:
    """A tiny model with a real tokenizer."""
    sizes = sizes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    return tiny_models.save_with_tokenizer(folder, family, sizes)


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    with Fleet(
        num_shard=2, num_workers=1, model_id=model, step_timeout_s=STEP_TIMEOUT_S, **SETTINGS
    ) as fleet:
        yield fleet


async def interrupted(fleet: Fleet, number: int, sent: int) -> list[list[int]]:
    return await interrupt_worker(fleet, number, sent, MAX_NEW_TOKENS, STREAMS)


async def undisturbed(fleet: Fleet) -> list[list[int]]:
    return await Load(fleet, MAX_NEW_TOKENS, STREAMS).whole()


@pytest.mark.slow
async def test_rows_of_a_stopped_rank_resume_on_the_other_worker(model: Path) -> None:
    """They do not wait until their own worker has restarted."""
    with Fleet(
        num_shard=2, num_workers=2, model_id=model, step_timeout_s=STEP_TIMEOUT_S, **SETTINGS
    ) as fleet:
        expected = await undisturbed(fleet)
        assert await interrupted(fleet, 2, signal.SIGSTOP) == expected


@pytest.mark.slow
async def test_rows_whose_cache_is_rounded_resume_with_the_same_ids(model: Path) -> None:
    """What a killed worker had rounded is computed and rounded again in the same way on each rank."""
    own = SETTINGS | {"kv_cache_dtype": "fp8_e5m2"}
    with Fleet(num_shard=2, num_workers=1, model_id=model, **own) as fleet:
        expected = await undisturbed(fleet)
        assert await interrupted(fleet, 0, signal.SIGKILL) == expected


@pytest.mark.slow
async def test_rows_over_latents_resume_with_the_same_ids(tmp_path: Path) -> None:
    """Each rank has all latents of a token, and its part of the heads."""
    model = save_model(tmp_path, *tiny_models.FAMILIES["DeepSeek-V3"])
    with Fleet(num_shard=2, num_workers=1, model_id=model, **SETTINGS) as fleet:
        expected = await undisturbed(fleet)
        assert await interrupted(fleet, 0, signal.SIGKILL) == expected


@pytest.mark.slow
async def test_ids_of_the_default_model_equal_transformers() -> None:
    """Its nine heads and three KV heads cannot be divided by two."""
    prompts = [PROMPTS[place] for place in FEW]
    with Fleet(num_shard=2, num_workers=1, **SETTINGS | {"kv_cache_bytes": "128MiB"}) as fleet:
        bodies = [
            {"inputs": prompt, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
            for prompt in prompts
        ]
        answers = await asyncio.gather(
            *(stream(f"{fleet.base_url}/generate_stream", body) for body in bodies)
        )
    assert [answer.ids for answer in answers] == reference_ids(prompt_ids(prompts), NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "sent"), [(2, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGSTOP)]
)
async def test_a_process_that_dies_or_stops_costs_no_token(fleet: Fleet, number: int, sent: int) -> None:
    expected = await undisturbed(fleet)
    assert await interrupted(fleet, number, sent) == expected
