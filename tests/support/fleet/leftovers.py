"""What is left in a fleet when everybody has gone: keys, rows, processes."""

import contextlib

import psutil
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet

KEYS = Keys("default")
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


def processes(fleet: Fleet) -> list[psutil.Process]:
    """Return all processes without broker and launcher, but with engines, when none of them just ends."""
    found: list[psutil.Process] = []
    for name, pid in fleet.pids().items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [] if name == "broker" else [process, *process.children(recursive=True)]
    return found
