"""A batcher that schedules nothing: it has the lease and sends heartbeats, as an active one that works."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from redis.asyncio import Redis

from common.broker.client import connect
from common.broker.heartbeat import Heartbeat
from common.broker.keys import LEASE_S, Keys
from common.broker.pool_client import PoolClient

HEARTBEAT_S = 0.1
TTL_S = 5.0


@contextlib.asynccontextmanager
async def batching(url: str, name: str = "b0-1", pool: str = "default") -> AsyncIterator[None]:
    """Keep a batcher active while the context is open; afterwards none of its keys is left."""
    keys = Keys(pool)
    async with connect(url) as redis:
        renewing = asyncio.create_task(renew(redis, keys, name))
        try:
            async with Heartbeat(PoolClient(redis, keys), "batcher", name, TTL_S).sending(HEARTBEAT_S):
                yield
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await redis.delete(keys.batcher)


async def renew(redis: Redis, keys: Keys, name: str) -> None:
    while True:
        await redis.set(keys.batcher, name, px=round(LEASE_S * 1000))
        await asyncio.sleep(HEARTBEAT_S)
