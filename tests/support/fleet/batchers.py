"""Batchers beside a broker of the test: processes, and one that schedules nothing; and requests that are
queued as a gateway does.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial

from redis.asyncio import Redis

from common.broker.client import connect
from common.broker.committed import Committed, read
from common.broker.heartbeat import Heartbeat
from common.broker.keys import LEASE_S
from common.broker.pool_client import PoolClient
from tests.support.broker_state import KEYS, queue
from tests.support.forks.client import ForkedProcess
from tests.support.waiting import in_background, wait_until

CHANNEL = KEYS.events("g")


@contextlib.contextmanager
def batcher(url: str, name: str = "b0", **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        **os.environ,
        "REDIS_URL": url,
        "PROCESS_NAME": name,
        "PARENT_PID": str(os.getpid()),
        "HEARTBEAT_S": "0.1",
        "WORKER_TTL_S": "1",
        **settings,
    }
    process = ForkedProcess([sys.executable, "-P", "-m", "batcher"], env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


admit = partial(queue, prompt=[1, 2, 3], num_tokens=5, channel=CHANNEL, gateway="g")


async def ended(redis: Redis, name: str) -> Committed:
    """Return the state of a request once it has ended."""
    await wait_until(lambda: redis.hexists(KEYS.request(name), "terminal"))
    return (await read(PoolClient(redis, KEYS), [name]))[name]


async def waiting(redis: Redis, count: int) -> bool:
    return int(await redis.hget(KEYS.state, "waiting") or 0) == count  # type: ignore[misc]


# --- scripted batcher ---------------------------------------------------------------------------------------

SCRIPTED = "b0-1"
HEARTBEAT_S = 0.1
TTL_S = 5.0


@contextlib.asynccontextmanager
async def batching(url: str) -> AsyncIterator[None]:
    """Keep a batcher active while the context is open; afterwards none of its keys is left."""
    async with connect(url) as redis:
        beats = Heartbeat(PoolClient(redis, KEYS), "batcher", SCRIPTED, TTL_S).sending(HEARTBEAT_S)
        try:
            async with in_background(renew(redis)), beats:
                yield
        finally:
            await redis.delete(KEYS.batcher)


async def renew(redis: Redis) -> None:
    while True:
        await redis.set(KEYS.batcher, SCRIPTED, px=round(LEASE_S * 1000))
        await asyncio.sleep(HEARTBEAT_S)
