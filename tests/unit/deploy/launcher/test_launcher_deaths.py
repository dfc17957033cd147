"""What the launcher says of processes that have ended."""

import pytest
from redis.asyncio import Redis

from batcher.lease import Lease
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.launcher import report_death

KEYS = Keys("default")


@pytest.fixture
def settings(broker: Broker) -> Settings:
    return Settings(redis_url=broker.url)


async def test_the_lease_of_a_dead_batcher_is_free_at_once(redis: Redis, settings: Settings) -> None:
    """That of another one stays."""
    pool = PoolClient(redis, KEYS)
    dead, other = Lease(pool, "b0-1", 60), Lease(pool, "b1-1", 60)
    await dead.acquire()
    await report_death(settings, "batcher", "b1-1")
    assert await redis.get(KEYS.batcher) == b"b0-1"
    await report_death(settings, "batcher", "b0-1")
    await other.acquire()
    await report_death(settings, "batcher", "b0-1")
    assert await redis.get(KEYS.batcher) == b"b1-1"


async def test_a_dead_gateway_is_marked_until_its_heartbeat_expires(redis: Redis, settings: Settings) -> None:
    """One that has left by itself is not there again."""
    await redis.hset(KEYS.gateway("g0-1"), "streams", "3")  # type: ignore[misc]
    await redis.pexpire(KEYS.gateway("g0-1"), 5000)
    for name in ("g0-1", "g1-1"):
        await report_death(settings, "gateway", name)
    assert await redis.hget(KEYS.gateway("g0-1"), "state") == b"died"  # type: ignore[misc]
    assert await redis.pttl(KEYS.gateway("g0-1")) <= 5000
    assert not await redis.exists(KEYS.gateway("g1-1"))
