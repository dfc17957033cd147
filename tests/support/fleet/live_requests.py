"""Requests that a fleet is working on, as its broker knows them."""

import os
import signal

from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.waiting import wait_until

KEYS = Keys("default")


async def live_requests(redis: Redis) -> list[str]:
    """Return the keys of requests over HTTP that have not ended. Requests of jobs belong to no gateway, and
    are left out.
    """
    live = []
    async for key in redis.scan_iter(KEYS.request("*")):
        gateway, terminal = await redis.hmget(key, ["gateway", "terminal"])  # type: ignore[misc]
        if gateway and not terminal:
            live.append(key.decode())
    return live


async def worker_of(redis: Redis, request: str) -> str:
    """Return the worker that runs a request, if one does."""
    worker: bytes | None = await redis.hget(request, "worker")  # type: ignore[misc]
    return (worker or b"").decode()


async def pid_of(redis: Redis, worker: str) -> int:
    """Return the worker's process id; 0 while it has no heartbeat."""
    return int(await redis.hget(KEYS.worker(worker), "pid") or 0)  # type: ignore[misc]


async def kill_worker_of(redis: Redis, request: str) -> None:
    """Kill the worker of a request, once it runs. (A signal to process 0 would go to all of pytest.)"""

    async def pid() -> int:
        return await pid_of(redis, await worker_of(redis, request))

    os.kill(await wait_until(pid), signal.SIGKILL)
