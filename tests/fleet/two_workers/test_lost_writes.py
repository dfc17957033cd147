"""A broker that comes back without what was written last, or without anything: streams go on."""

import os
import signal
from collections.abc import Iterator

import pytest

from common.broker.client import connect
from tests.support.broker.rollback import RestorableBroker, restorable
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load

SETTINGS = {
    "num_workers": 1,
    "dtype": "float32",
    "debug_kv": True,
    "threads": 1,
    "kv_cache_bytes": "128MiB",
    "worker_ttl_s": 3,
}
MAX_NEW_TOKENS = 40
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def restorable_broker() -> Iterator[RestorableBroker]:
    with restorable() as broker:
        yield broker


@pytest.fixture(scope="module")
def restorable_fleet(restorable_broker: RestorableBroker) -> Iterator[Fleet]:
    with Fleet(**SETTINGS, redis_url=restorable_broker.broker.url) as fleet:
        yield fleet


async def undisturbed(fleet: Fleet) -> list[list[int]]:
    return await Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS).whole()


@pytest.mark.slow
async def test_writes_that_the_broker_lost_cost_no_token(
    restorable_fleet: Fleet, restorable_broker: RestorableBroker
) -> None:
    """Half of the requests are lost, too. No process ends."""
    fleet, expected = restorable_fleet, await undisturbed(restorable_fleet)
    before = fleet.pids()
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS // 2)
    await load.progress(10)
    restorable_broker.keep()
    later = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    await later.progress(5)
    restorable_broker.restore()
    assert await load.whole() == expected[: NUM_STREAMS // 2]
    assert await later.whole() == expected
    assert fleet.pids() == before


@pytest.mark.slow
async def test_a_broker_that_lost_everything_costs_no_token_and_no_load_of_the_model(fleet: Fleet) -> None:
    """The workers go on as their next incarnations, over the same engines."""

    def engines() -> list[int]:
        return [engine.pid for name in ("w0", "w1") for engine in fleet.engines(name)]

    expected = await undisturbed(fleet)
    before = fleet.pids(), engines()
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    async with connect(fleet.redis_url) as redis:
        await redis.flushall()
    assert await load.whole() == expected
    assert (fleet.pids(), engines()) == before


@pytest.mark.slow
async def test_a_worker_that_dies_with_the_last_writes_costs_no_shown_token(
    restorable_fleet: Fleet, restorable_broker: RestorableBroker
) -> None:
    fleet, expected = restorable_fleet, await undisturbed(restorable_fleet)
    load = Load(fleet, MAX_NEW_TOKENS, NUM_STREAMS)
    await load.progress(10)
    restorable_broker.keep()
    await load.progress(10)
    os.kill(fleet.pid("w0"), signal.SIGKILL)
    restorable_broker.restore()
    assert await load.whole() == expected
