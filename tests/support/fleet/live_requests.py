"""Requests that a fleet is working on, as its broker knows them."""

import os
import signal

from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.waiting import wait_until

KEYS = Keys("default")


async def live_requests(redis: Redis) -> list[str]:
    """Keys of requests over HTTP that have not ended. Those of jobs, which are kept, belong to no gateway."""
    live = []
    async for key in redis.scan_iter(KEYS.request("*")):
        gateway, terminal = await redis.hmget(key, ["gateway", "terminal"])  # type: ignore[misc]
        if gateway and not terminal:
            live.append(key.decode())
    return live


async def worker_of(redis: Redis, request: str) -> str:
    """The worker that runs a request, if one does."""
    worker: bytes | None = await redis.hget(request, "worker")  # type: ignore[misc]
    return (worker or b"").decode()


async def pid_of(redis: Redis, worker: str) -> int:
    """0 while it has no heartbeat."""
    return int(await redis.hget(KEYS.worker(worker), "pid") or 0)  # type: ignore[misc]


async def kill_worker_of(redis: Redis, request: str) -> None:
    """Kills the worker that runs a request, once one does. (Signals to process 0 go to all of pytest.)"""

    async def pid() -> int:
        return await pid_of(redis, await worker_of(redis, request))

    os.kill(await wait_until(pid), signal.SIGKILL)
