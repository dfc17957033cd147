"""What is left in a fleet when everybody has gone: keys, rows, tasks, subscriptions, file handles, memory."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet, title
from tests.support.waiting import wait_until

KEYS = Keys("default")
NUM_LOOKS, LOOK_S = 4, 0.3
STANDING = {
    *("workers", "processes", "batcher", "epoch", "clock", "control", "state", "requests", "worker"),
    *("gateway", "plans", "reports", "log", "metrics", "timeline", "submit", "tenants", "jobworker"),
    *("arq", "jobs"),
}
"""Keys of an idle fleet: all but those of requests and jobs."""
KEPT = [build("job-*") for build in (KEYS.job, KEYS.result, KEYS.reply, KEYS.request, KEYS.tokens)]
"""Keys that answered jobs keep for an hour. Requests over HTTP keep none."""


async def idle(redis: Redis, ignored: set[bytes]) -> bool:
    """Whether each process reports no request, row, block, stream or job, and no other key is left."""
    state: dict[bytes, bytes] = await redis.hgetall(KEYS.state)  # type: ignore[misc]
    keys = [key async for key in redis.scan_iter(KEYS.gateway("*"))]
    gateways: list[dict[bytes, bytes]] = [await redis.hgetall(key) for key in keys]  # type: ignore[misc]
    kept = ignored | {key for pattern in KEPT async for key in redis.scan_iter(pattern)}
    kinds = {key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*")) if key not in kept}
    busy = [int(state.get(name, b"1")) for name in (b"requests", b"rows", b"blocks")]
    return (
        not any(busy)
        and all(gateway.get(b"streams", b"0") == b"0" for gateway in gateways)  # or its heartbeat has expired
        and kinds <= STANDING
        and not await redis.xlen(KEYS.requests)
        and not await redis.xlen(KEYS.submit)
    )


async def tasks(redis: Redis) -> dict[bytes, int]:
    """Return the most tasks of each gateway in the heartbeats of a second: some beats count tasks that wait
    for that beat, others do not.
    """
    most: Counter[bytes] = Counter()
    for _ in range(NUM_LOOKS):
        keys = [key async for key in redis.scan_iter(KEYS.gateway("*"))]
        most |= Counter({key: int(await redis.hget(key, "tasks") or 0) for key in keys})  # type: ignore[misc]
        await asyncio.sleep(LOOK_S)
    return most


async def settled_tasks(redis: Redis) -> dict[bytes, int]:
    """As `tasks`, once the count was the same twice. Raises TimeoutError."""
    counts = [await tasks(redis)]

    async def settled() -> dict[bytes, int] | None:
        counts.append(await tasks(redis))
        return counts[-1] if counts[-1] == counts[-2] else None

    found: dict[bytes, int] = await wait_until(settled)
    return found


async def subscriptions(redis: Redis) -> list[Any]:
    channels = await redis.pubsub_channels()
    return [await redis.pubsub_numpat(), sorted(await redis.pubsub_numsub(*channels))]


def processes(fleet: Fleet) -> list[psutil.Process]:
    """Return all processes without broker and launcher, but with engines, when none of them just ends."""
    found: list[psutil.Process] = []
    for name, pid in fleet.pids().items():
        with contextlib.suppress(psutil.Error):
            found += [] if name == "broker" else tree(psutil.Process(pid))
    return found


def tree(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def handles(fleet: Fleet) -> dict[int, int]:
    return {process.pid: count for process, count in each(fleet, psutil.Process.num_fds)}


def memory(fleet: Fleet) -> dict[str, int]:
    """Return bytes by the name of the process."""
    return {
        " ".join(title(process)): size
        for process, size in each(fleet, lambda process: process.memory_info().rss)
    }


def each(fleet: Fleet, read: Callable[[psutil.Process], int]) -> Iterator[tuple[psutil.Process, int]]:
    """Return what `read` finds of each process that has not ended meanwhile. The kernel may show nothing of
    one that is just ending.
    """
    for process in processes(fleet):
        with contextlib.suppress(psutil.Error):
            yield process, read(process)
