"""AdapterKeeper: adapters that were unloaded go once no live request has them."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from batcher.housekeeping import LINGER_S, LOAD_TIMEOUT_S, AdapterKeeper
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from common.adapter_registry import change_registry, read_registry
from common.adapters import LEAVING, LOADING, READY, PoolAdapter
from common.broker.pool_client import PoolClient
from tests.support.broker_state import KEYS
from tests.support.fleet.simulated_pool import request

SQL = PoolAdapter("sql", "/sql", "a" * 64)


@pytest.fixture
def keeper(redis: Redis) -> AdapterKeeper:
    return AdapterKeeper(PoolClient(redis, KEYS))


async def put(keeper: AdapterKeeper, state: str) -> None:
    await change_registry(keeper.pool, lambda found: found.put(replace(SQL, state=state)))


def scheduler(*adapters: str) -> Scheduler:
    """Make one whose requests, which wait, have these adapters."""
    made = Scheduler(WorkerLimits(), epoch=1)
    for i, adapter in enumerate(adapters):
        sequence = request(f"r{i}", 20, 4, i)
        sequence.request = replace(sequence.request, adapter=adapter)
        made.register(sequence)
        made.enqueue(sequence)
    return made


def pass_time(keeper: AdapterKeeper, seconds: float) -> None:
    since = keeper.waiting
    since.since_s = {one: at_s - seconds for one, at_s in since.since_s.items()}


async def keys(keeper: AdapterKeeper) -> list[str]:
    return [*(await read_registry(keeper.pool)).adapters]


async def test_an_unloaded_adapter_goes_once_nobody_has_used_it_for_a_while(keeper: AdapterKeeper) -> None:
    await put(keeper, LEAVING)
    assert await keeper.look(scheduler(SQL.key)) == []
    pass_time(keeper, 10 * LINGER_S)
    assert await keeper.look(scheduler(SQL.key)) == []
    assert await keys(keeper) == [SQL.key], "a live request has it"
    await keeper.look(scheduler())
    assert await keys(keeper) == [SQL.key], "a gateway may not know yet"
    pass_time(keeper, LINGER_S)
    await keeper.look(scheduler())
    assert await keys(keeper) == []


async def test_an_adapter_whose_gateway_died_while_it_was_loaded_is_taken_back(keeper: AdapterKeeper) -> None:
    await put(keeper, LOADING)
    await keeper.look(scheduler())
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler())
    assert await keys(keeper) == [SQL.key]
    pass_time(keeper, LOAD_TIMEOUT_S / 2)
    await keeper.look(scheduler())
    assert await keys(keeper) == []


async def test_a_request_whose_adapter_no_worker_will_load_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    assert await keeper.look(scheduler(SQL.key)) == []
    await change_registry(keeper.pool, lambda found: found.with_failure(SQL, "it ended an engine"))
    assert await keeper.look(scheduler(SQL.key, "")) == ["r0"]


async def test_a_request_whose_adapter_is_gone_is_named(keeper: AdapterKeeper) -> None:
    await put(keeper, READY)
    assert await keeper.look(scheduler("", SQL.key, "other@1")) == ["r2"]


async def test_nothing_is_lost_with_the_registry(keeper: AdapterKeeper) -> None:
    assert await keeper.look(scheduler(SQL.key)) == [], "a gateway writes it again"
