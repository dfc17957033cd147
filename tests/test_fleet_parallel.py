"""Workers of two ranks in a whole fleet: the ids of one rank, and whoever of them dies or stops takes the whole worker along."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import model_files
from tests import tiny_models
from tests.fleet import Fleet
from tests.loads import Load
from tests.waiting import wait_until, wait_until_sync

MAX_NEW_TOKENS = 100
STREAMS = 3
STEP_TIMEOUT_S = 2
VOCAB = 49_152
SETTINGS = {"device": "cpu", "dtype": "float32", "debug_kv": True, "kv_cache_bytes": "32MiB", "worker_ttl_s": 3, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a real tokenizer: what is slow here are processes, not numbers."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, "Llama", tiny_models.LLAMA | {"vocab_size": VOCAB, "max_position_embeddings": 512})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_files.resolve("smollm2") / name, folder)
    return folder


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    with Fleet(num_shard=2, num_workers=1, model_id=model, step_timeout_s=STEP_TIMEOUT_S, **SETTINGS) as fleet:
        yield fleet


def engines(fleet: Fleet, worker: str = "w0") -> list[psutil.Process]:
    """The ranks of a worker, in order."""
    return sorted(psutil.Process(fleet.pid(worker)).children(), key=lambda process: process.pid)


async def interrupted(fleet: Fleet, number: int, sent: int) -> list[list[int]]:
    """Ids of streams under which a signal goes to one rank of w0. Returns when all are whole; no process of that life is left."""
    await wait_until(lambda: fleet.workers_ready() == fleet.settings["num_workers"], 60)
    pid, ranks = fleet.pid("w0"), engines(fleet)
    assert len(ranks) == 2
    load = Load(fleet, MAX_NEW_TOKENS, STREAMS)
    await load.progress(5)
    assert load.running
    os.kill(ranks[number].pid, sent)
    await asyncio.to_thread(fleet.restarted, "w0", pid)
    await wait_until(lambda: not any(process.is_running() for process in ranks), 10)
    return await load.whole()


async def undisturbed(fleet: Fleet) -> list[list[int]]:
    return await Load(fleet, MAX_NEW_TOKENS, STREAMS).whole()


async def test_a_killed_or_stopped_rank_costs_no_token(fleet: Fleet) -> None:
    wanted = await undisturbed(fleet)
    assert await interrupted(fleet, 1, signal.SIGKILL) == wanted
    assert await interrupted(fleet, 1, signal.SIGSTOP) == wanted


@pytest.mark.slow
async def test_ranks_give_the_ids_of_one(fleet: Fleet, model: Path) -> None:
    with Fleet(num_workers=1, model_id=model, **SETTINGS) as alone:
        wanted = await undisturbed(alone)
    assert await undisturbed(fleet) == wanted
