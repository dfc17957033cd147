"""One fleet for all modules of this folder: starting one costs more than most of the tests."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from common.broker.client import connect
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import PATIENCE_S, wait_until_sync

SETTINGS = {
    "num_workers": 2,
    "num_gateways": 2,
    "dtype": "float32",
    "threads": 1,
    "kv_cache_bytes": "384MiB",
    "debug_kv": True,
    "max_batch_size": 16,
    "max_batch_prefill_tokens": 64,
    "worker_ttl_s": 3,
    "stopped_grace_s": 0,
}
NUM_PROCESSES = 6
"""Number of processes: the broker, the batcher, and two of each other kind."""


@pytest.fixture(scope="package")
def shared_fleet() -> Iterator[Fleet]:
    with Fleet(**SETTINGS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """The fleet, whole again, whatever an earlier module has done to it. Its processes have the rights of
    their kinds alone (common/broker/acl.py), and no test may need others.
    """
    wait_until_sync(lambda: len(shared_fleet.pids()) == NUM_PROCESSES)
    wait_until_sync(lambda: shared_fleet.workers_ready() == 2)
    yield shared_fleet
    assert shared_fleet.refused() == []


@pytest.fixture
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=90, limits=limits) as client:
        yield client


@pytest.fixture
async def redis(fleet: Fleet) -> AsyncIterator[Redis]:
    async with connect(fleet.redis_url, socket_connect_timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{fleet.base_url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client
