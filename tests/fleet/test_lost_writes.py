"""A broker that comes back without what was written last, or without anything: streams go on."""

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from common.broker.client import connect
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.rollback import RestorableBroker, restorable

SETTINGS = {
    "num_workers": 1,
    "dtype": "float32",
    "debug_kv": True,
    "threads": 1,
    "kv_cache_bytes": "128MiB",
    "worker_ttl_s": 3,
}
MAX_NEW_TOKENS = 60
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def restorable_broker() -> Iterator[RestorableBroker]:
    with restorable() as broker:
        yield broker


@pytest.fixture(scope="module")
def fleet(restorable_broker: RestorableBroker) -> Iterator[Fleet]:
    with Fleet(**SETTINGS, redis_url=restorable_broker.broker.url) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[list[int]]:
    async def run() -> list[list[int]]:
        return await Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS).whole()

    return asyncio.run(run())


async def test_writes_that_the_broker_lost_cost_no_token(
    fleet: Fleet, restorable_broker: RestorableBroker, undisturbed: list[list[int]]
) -> None:
    """It also loses that half of the requests exist. No process ends."""
    before = fleet.pids()
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS // 2)
    await load.progress(10)
    restorable_broker.keep()
    later = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    await later.progress(5)
    restorable_broker.restore()
    assert await load.whole() == undisturbed[: NUM_STREAMS // 2]
    assert await later.whole() == undisturbed
    assert fleet.pids() == before


async def test_a_broker_that_lost_everything_costs_no_token_and_no_load_of_the_model(
    fleet: Fleet, undisturbed: list[list[int]]
) -> None:
    """The worker goes on as its next incarnation, over the same engine."""

    def engines() -> list[int]:
        return [child.pid for child in psutil.Process(fleet.pid("w0")).children()]

    before = fleet.pids(), engines()
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    async with connect(fleet.redis_url) as redis:
        await redis.flushall()
    assert await load.whole() == undisturbed
    assert (fleet.pids(), engines()) == before


@pytest.mark.slow
async def test_a_worker_that_dies_with_the_last_writes_costs_no_shown_token(
    fleet: Fleet, restorable_broker: RestorableBroker, undisturbed: list[list[int]]
) -> None:
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    restorable_broker.keep()
    await load.progress(10)
    os.kill(fleet.pid("w0"), signal.SIGKILL)
    restorable_broker.restore()
    assert await load.whole() == undisturbed
