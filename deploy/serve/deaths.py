"""Deaths: what the launcher says in Redis of a process that has ended.

So nobody waits until its heartbeat or its lease expires.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from common.broker.client import ERRORS, broker_url, connect, script
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.settings.settings import Settings

log = logging.getLogger(__name__)

POLL_S = 0.1
REPORT_TIMEOUT_S = 5.0
NOTE_TTL_S = 60


async def report_worker(redis: Redis, keys: Keys, incarnation: str) -> None:
    """Tell the batcher that a worker has ended."""
    entry: Any = {"died": encode(WorkerDied(incarnation))}
    await redis.xadd(keys.control, entry)


async def mark_gateway(redis: Redis, keys: Keys, incarnation: str) -> None:
    """Note the death in what is left of a gateway's heartbeat: the others claim its jobs."""
    if await redis.exists(keys.gateway(incarnation)):
        async with redis.pipeline() as pipe:
            pipe.hset(keys.gateway(incarnation), "state", "died")
            pipe.expire(keys.gateway(incarnation), NOTE_TTL_S, lt=True)
            await pipe.execute()


async def release_lease(redis: Redis, keys: Keys, incarnation: str) -> None:
    """Release the lease, if this batcher held it: another takes it."""
    await script(redis, "lease")(keys=[keys.batcher, keys.epoch, keys.clock], args=[incarnation, 0, "", ""])


DEATHS: dict[str, Callable[[Redis, Keys, str], Awaitable[None]]] = {
    "worker": report_worker,
    "gateway": mark_gateway,
    "batcher": release_lease,
}
"""What is said, by the kind of the process."""


async def report_death(settings: Settings, kind: str, incarnation: str) -> None:
    """Say that a process has ended, for as long as that is sooner than what it left behind expires."""
    async with connect(broker_url(settings)) as redis:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while True:
                    with contextlib.suppress(*ERRORS):
                        await DEATHS[kind](redis, Keys(settings.pool), incarnation)
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning(
                "the broker does not answer: others learn of the end of %s when its heartbeat expires",
                incarnation,
            )
