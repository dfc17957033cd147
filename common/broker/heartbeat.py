"""Heartbeat: what a process reports about itself in Redis at an interval while it lives; and the scripts of
several packages about processes: the lease of the active batcher, and a worker's end.

Workers have a script of their own, `worker_heartbeat`, which a seal refuses.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, OUTAGE, describe_error
from common.broker.keys import STREAMS_TTL_MS, Keys
from common.broker.lua import Args, Fields, ScriptCall, call_script, decode_all, in_pairs
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

REMOVE_TIMEOUT_S = 1.0

HeartbeatFields = dict[str, str | int]


class ProcessBeat(NamedTuple):
    """The heartbeat of a process that is no worker."""

    kind: str
    name: str
    ttl_ms: int
    fields: Fields

    @property
    def args(self) -> Args:
        return {"member": f"{self.kind}:{self.name}", "ttl_ms": self.ttl_ms}


def process_fields() -> HeartbeatFields:
    """Return process id and host name, which say where this process runs."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


class Heartbeat:
    """Heartbeat of a process that is no worker; it expires after `ttl_s`."""

    def __init__(self, pool: PoolClient, kind: str, name: str, ttl_s: float) -> None:
        self.pool = pool
        self.kind = kind
        self.name = name
        self.ttl_ms = round(ttl_s * 1000)

    def beat(self, **fields: str | int) -> ProcessBeat:
        """Return what the script writes: these fields, and where the process runs."""
        return ProcessBeat(self.kind, self.name, self.ttl_ms, process_fields() | fields)

    async def send(self, **fields: str | int) -> None:
        beat, owner = self.beat(**fields), (self.kind, self.name)
        more = in_pairs(beat.fields)
        call = call_script("heartbeat", bool, self.pool.keys, *owner, args=beat.args, more_args=more)
        await self.pool.run(call)

    async def send_forever(self, every_s: float, fields: Callable[[], HeartbeatFields]) -> None:
        """Never returns: errors of the broker are logged, and the next heartbeat is sent all the same."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self.send(**fields())
                OUTAGE.succeeded()
            except ERRORS as error:
                log.debug("heartbeat not sent: %s", describe_error(error))
            await asyncio.sleep(until_beat(every_s))

    @contextlib.asynccontextmanager
    async def sending(
        self, every_s: float, fields: Callable[[], HeartbeatFields] = dict
    ) -> AsyncIterator[None]:
        """Send heartbeats while the context is open; remove the last one at its end."""
        task = asyncio.create_task(self.send_forever(every_s, fields))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.remove_in_time()

    async def remove_in_time(self) -> None:
        """Remove it, unless the broker does not answer: then it expires."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                await self.remove()
        except ERRORS as error:
            log.warning("the heartbeat stays until it expires: %s", describe_error(error))

    async def remove(self) -> None:
        async with self.pool.redis.pipeline() as pipe:
            pipe.delete(self.pool.keys.process(self.kind, self.name))
            pipe.zrem(self.pool.keys.processes, f"{self.kind}:{self.name}")
            await pipe.execute()


class LeaseReply(NamedTuple):
    """The epoch, or "" while another holder has the lease; and the id of the server that answered."""

    epoch: str
    server_id: str


def lease(
    keys: Keys, *, holder: str, ttl_ms: int, own_epoch: str, clock_ms: int | bytes
) -> ScriptCall[LeaseReply]:
    """Take, renew or release the lease of the active batcher.

    Args:
        ttl_ms: 0 releases the lease.
        own_epoch: the epoch of the holder; "" takes the lease.
        clock_ms: of the holder, what the pool's clock shows; of another, b"" or where that clock has stopped.
    """
    args: Args = {"holder": holder, "ttl_ms": ttl_ms, "own_epoch": own_epoch, "clock_ms": clock_ms}
    return call_script("lease", lambda reply: LeaseReply(*decode_all(reply)), keys, args=args)


def drain(keys: Keys, worker: str) -> ScriptCall[tuple[str, int] | None]:
    """Ask a worker to drain. The reply has its state and number of rows; None: there is no such worker."""

    def read(reply: list[bytes | None] | None) -> tuple[str, int] | None:
        return ((reply[0] or b"").decode(), int(reply[1] or 0)) if reply else None

    return call_script("drain", read, keys, worker)


def seal(keys: Keys, worker: str, *, why: str) -> ScriptCall[bool]:
    """Seal an incarnation: nothing can be appended to its streams any more. False if it has no log.

    Args:
        why: `died`, `drained` or `unreadable`.
    """
    return call_script(
        "seal", bool, keys, worker, args={"incarnation": worker, "why": why, "ttl_ms": STREAMS_TTL_MS}
    )
