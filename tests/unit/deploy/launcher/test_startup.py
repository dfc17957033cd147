"""What a starting fleet is said to wait for."""

from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from common.broker.heartbeat import Heartbeat
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.fleet import LocalFleet, new_fleet
from deploy.launcher.startup import describe_wait, last_lines


@pytest.fixture
def fleet(broker: Broker) -> Iterator[LocalFleet]:
    settings = Settings(redis_url=broker.url, num_workers=2, preload_gateway=False, preload_worker=False)
    fleet = new_fleet(settings, None)
    for worker in fleet.workers:
        worker.incarnation = f"{worker.name}-1"
    yield fleet


async def test_a_worker_that_says_nothing_for_a_moment_does_what_it_did_last(
    fleet: LocalFleet, redis: Redis
) -> None:
    last: dict[str, str] = {}
    async with PoolClient.connect(fleet.settings) as pool:
        assert await describe_wait(fleet, pool, last) == "w0 w1: starting"
        heartbeat = Heartbeat(pool, "starting", "w0-1", ttl_s=60)
        await heartbeat.send(doing="loading a model")
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await heartbeat.remove()
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await redis.set(pool.keys.worker("w0-1"), "its heartbeat")
        assert await describe_wait(fleet, pool, last) == "w1: starting"


def test_the_command_to_try_has_the_header_of_a_key_but_not_the_key() -> None:
    assert "Authorization" not in last_lines(Settings())
    said = last_lines(Settings(api_key="secret"))
    assert '-H "Authorization: Bearer $API_KEY"' in said and "secret" not in said
