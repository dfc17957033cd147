"""Deaths: what the launcher says in Redis of a process that has ended.

So nobody waits until its heartbeat or its lease expires.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from common.broker import batcher_scripts
from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.settings.settings import Settings

log = logging.getLogger(__name__)

POLL_S = 0.1
REPORT_TIMEOUT_S = 5.0
NOTE_TTL_S = 60


async def report_worker(pool: PoolClient, incarnation: str) -> None:
    """Tell the batcher that a worker has ended."""
    entry: Any = {"died": encode(WorkerDied(incarnation))}
    await pool.redis.xadd(pool.keys.control, entry)


async def mark_gateway(pool: PoolClient, incarnation: str) -> None:
    """Note the death in what is left of a gateway's heartbeat: the others claim its jobs."""
    key = pool.keys.gateway(incarnation)
    if await pool.redis.exists(key):
        async with pool.redis.pipeline() as pipe:
            pipe.hset(key, "state", "died")
            pipe.expire(key, NOTE_TTL_S, lt=True)
            await pipe.execute()


async def release_lease(pool: PoolClient, incarnation: str) -> None:
    """Release the lease, if this batcher held it: another takes it."""
    await pool.run(batcher_scripts.lease(pool.keys, holder=incarnation, ttl_ms=0, own_epoch="", clock_ms=b""))


DEATHS: dict[str, Callable[[PoolClient, str], Awaitable[None]]] = {
    "worker": report_worker,
    "gateway": mark_gateway,
    "batcher": release_lease,
}
"""What is said, by the kind of the process."""


async def report_death(settings: Settings, kind: str, incarnation: str) -> None:
    """Say that a process has ended, for as long as that is sooner than what it left behind expires."""
    async with PoolClient.connect(settings) as pool:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while True:
                    with contextlib.suppress(*ERRORS):
                        await DEATHS[kind](pool, incarnation)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning(
                "the broker does not answer: others learn of the end of %s when its heartbeat expires",
                incarnation,
            )
