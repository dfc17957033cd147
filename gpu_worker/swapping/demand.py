"""Demand: what waits in each pool, as its batcher says, and the claim of a worker that wakes one."""

import math
from collections.abc import Collection, Mapping

from redis.asyncio import Redis

from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from gpu_worker.swapping.choose import PoolDemand

CLAIM_SPARE_S = 5.0
"""A claim lasts this much longer than twice the swap."""
COUNTS = ["waiting", "waiting_tokens", "oldest_ms", "due_ms", "rows", "workers"]
"""Fields of a pool's state that say what it is asked for."""
TOLD_MS = 1500
"""Time in which a batcher has said that its pool has a worker."""


async def read_demands(redis: Redis, pools: Collection[str]) -> dict[str, PoolDemand]:
    """What each pool is asked for: nothing where it has no batcher."""
    async with redis.pipeline(transaction=False) as pipe:
        for pool in pools:
            pipe.hmget(Keys(pool).state, COUNTS)
        found = await pipe.execute()
    return {
        pool: parse_demand(
            pool, {name: int(value) for name, value in zip(COUNTS, values, strict=True) if value}
        )
        for pool, values in zip(pools, found, strict=True)
    }


def parse_demand(pool: str, counts: Mapping[str, int]) -> PoolDemand:
    num_waiting = counts.get("waiting", 0)
    return PoolDemand(
        pool,
        num_waiting=num_waiting,
        waiting_tokens=counts.get("waiting_tokens", 0),
        waited_s=counts.get("oldest_ms", 0) / 1000,
        due_s=counts.get("due_ms", 0) / 1000 if num_waiting else math.inf,
        num_rows=counts.get("rows", 0),
        num_workers=counts.get("workers", 0),
    )


async def claim(client: PoolClient, worker: str, swap_s: float) -> bool:
    """Claim a pool → whether no other worker wakes its model at this moment. A claim expires when its worker
    should have joined.
    """
    ttl_ms = round(1000 * (2 * swap_s + CLAIM_SPARE_S))
    if await client.redis.set(client.keys.waking, worker, nx=True, px=ttl_ms):
        return True
    return bool(await client.redis.get(client.keys.waking) == worker.encode())


async def shorten_claim(client: PoolClient) -> None:
    """Let a claim expire soon, since its worker has joined: the batcher tells others."""
    await client.redis.pexpire(client.keys.waking, TOLD_MS, lt=True)
