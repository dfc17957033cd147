"""Lease: the right to be the active batcher of a pool, and when its holder may leave.

One batcher holds it at a time. Each new holder gets a higher epoch, which fences off the plans of earlier
holders. The holder sets the pool's clock whenever it renews the lease.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from common.broker import heartbeat
from common.broker.client import ERRORS, FailureLog, describe_error
from common.broker.heartbeat import LeaseReply
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat
from common.process.startup import READY
from common.settings.settings import Settings

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 1.0
RETRY_S = 0.2
HEARTBEATS_TO_SHOW = 2
"""Heartbeats within which a process shows that it was told to end; one may have been on its way."""
ENDING = (b"draining", b"died")
"""States of gateways that end."""


class LeaseLost(Exception):
    """Another batcher is active."""


class WritesLost(Exception):
    """The broker may lack what was written last, so this batcher may know what is no longer so. A new epoch
    begins with what the broker has.
    """


class PoolClock:
    """The clock that deadlines are told by: milliseconds that the pool's active batchers counted.

    It starts where the last holder of the lease left it, and goes on with this process's monotonic clock. So
    no jump of the broker's clock, or of a host's, moves a deadline, and time without an active batcher does
    not count.
    """

    def __init__(self, start_ms: int) -> None:
        self.offset_ms = start_ms - time.monotonic() * 1000

    def now_ms(self) -> int:
        return round(time.monotonic() * 1000 + self.offset_ms)


class Lease:
    """The lease, as `holder` asks for it and renews it.

    It survives its expiry: a broker that comes back without another holder grants it again. A lease that does
    not expire, because the broker's clock went back, is taken over when the pool's clock has stopped for as
    long as a lease lasts.

    Attributes:
        expires_s: monotonic time until which no other batcher can hold it.
        server_id: the server at the broker's address when the lease was taken. Another one, as after a
            restart or a failover, may lack what was written last.
        clock: the pool's clock, from the moment the lease is held.
        stopped_ms, stopped_since_s: what the pool's clock shows while another holds the lease, and since when
            (monotonic).
    """

    def __init__(self, pool: PoolClient, holder: str, ttl_s: float) -> None:
        self.pool = pool
        self.holder = holder
        self.ttl_s = ttl_s
        self.epoch = ""
        self.server_id = ""
        self.expires_s = 0.0
        self.clock = PoolClock(0)
        self.stopped_ms = b""
        self.stopped_since_s = time.monotonic()

    async def run_script(self, ttl_s: float, clock_ms: int | bytes) -> LeaseReply:
        """Take, renew or (with 0 seconds) release the lease.

        Args:
            clock_ms: of the holder, what the pool's clock shows; of another, what `watch_clock` returns.
        """
        asked_s = time.monotonic()
        ttl_ms, keys = int(ttl_s * 1000), self.pool.keys
        call = heartbeat.lease(
            keys, holder=self.holder, ttl_ms=ttl_ms, own_epoch=self.epoch, clock_ms=clock_ms
        )
        reply = await self.pool.run(call)
        self.expires_s = asked_s + ttl_s if reply.epoch else 0.0
        return reply

    async def acquire(self) -> int:
        """Wait until the lease is free, and take it. Return the new epoch."""
        self.epoch = ""
        standing_by = False
        failures = FailureLog(log, "asking for the lease")
        while True:
            with failures.caught():
                epoch, server_id = await self.run_script(self.ttl_s, await self.watch_clock())
                READY.set()
                if epoch:
                    held_ms = self.clock.now_ms() if self.server_id else 0
                    self.clock = PoolClock(
                        max(held_ms, int(await self.pool.redis.get(self.pool.keys.clock) or 0))
                    )
                    self.server_id = server_id
                    self.epoch = epoch
                    return int(epoch)
                if not standing_by:
                    log.info("another batcher is active: standing by")
                standing_by = True
            if failures.count:
                self.stopped_since_s = time.monotonic()  # the holder could not renew either
            await asyncio.sleep(min(RETRY_S, self.ttl_s / 4))

    async def watch_clock(self) -> bytes:
        """Return what the pool's clock shows if it has stood still for as long as a lease lasts, else b""."""
        shown_ms: bytes = await self.pool.redis.get(self.pool.keys.clock) or b""
        now_s = time.monotonic()
        if shown_ms != self.stopped_ms:
            self.stopped_ms, self.stopped_since_s = shown_ms, now_s
        return shown_ms if now_s - self.stopped_since_s > self.ttl_s else b""

    async def renew(self) -> None:
        """Renew it. Raises LeaseLost if another batcher took over, WritesLost if the broker is another server
        or has lost everything.
        """
        epoch, server_id = await self.run_script(self.ttl_s, self.clock.now_ms())
        if epoch != self.epoch:
            if not await self.pool.redis.exists(self.pool.keys.epoch):
                raise WritesLost("the broker has lost everything")
            raise LeaseLost(f"epoch {self.epoch} is over")
        if server_id != self.server_id:
            raise WritesLost("the broker was restarted or replaced")

    async def renew_forever(self) -> NoReturn:
        """Renew it at an interval, whatever else the batcher does. Raises LeaseLost, WritesLost."""
        failures = FailureLog(log, "renewing the lease")
        while True:
            with failures.caught():
                await self.renew()
            pause_s = self.ttl_s / 4
            await asyncio.sleep(min(RETRY_S, pause_s) if failures.count else until_beat(pause_s))

    async def confirm(self) -> None:
        """Renew it if it may have expired. Raises LeaseLost, WritesLost."""
        if time.monotonic() >= self.expires_s:
            await self.renew()

    async def release(self) -> None:
        """Release the lease, so a successor need not wait for its expiry."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self.run_script(0, self.clock.now_ms())
        except ERRORS as error:
            log.warning("the lease stays until it expires: %s", describe_error(error))


class HeartbeatCount:
    """How many heartbeats each process has sent since the first look; each look counts one at most."""

    def __init__(self) -> None:
        self.seen_ms: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def look(self, last_ms: Mapping[str, float]) -> None:
        """Count new heartbeats; `last_ms` is when the last one of each process came."""
        for name, at_ms in last_ms.items():
            self.counts[name] += self.seen_ms.get(name, at_ms) != at_ms
        self.seen_ms = {**last_ms}

    def believes(self, name: str) -> bool:
        return self.counts[name] >= HEARTBEATS_TO_SHOW


async def wait_until_unneeded(
    pool: PoolClient, settings: Settings, lease: Lease, told_to_end: asyncio.Event
) -> None:
    """Return once this batcher was told to end and may leave, or GRACEFUL_TERMINATION_TIMEOUT is over.

    Gateways and standbys count by what they have said since then: a process that was told to end at the same
    time, and has had no core yet, still looks as before.
    """
    await told_to_end.wait()
    batchers, gateways = HeartbeatCount(), HeartbeatCount()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.graceful_termination_timeout):
            while lease.epoch:
                if not await is_needed(pool, lease.holder, batchers, gateways):
                    return
                await asyncio.sleep(settings.heartbeat_s)


async def is_needed(
    pool: PoolClient, own_name: str, batchers: HeartbeatCount, gateways: HeartbeatCount
) -> bool:
    """Whether the active batcher must stay: until every gateway that ends has finished its streams, unless
    another batcher stands by. A gateway that is not believed yet may end as well.
    """
    try:
        batchers.look(await pool.processes("batcher"))
        gateways.look(await pool.processes("gateway"))
        async with pool.redis.pipeline(transaction=False) as pipe:
            for name in gateways.seen_ms:
                pipe.hmget(pool.keys.gateway(name), ["state", "streams"])
            answers = await pipe.execute()
    except ERRORS:
        return True
    has_standby = any(batchers.believes(name) for name in batchers.seen_ms if name != own_name)
    for name, (state, num_streams) in zip(gateways.seen_ms, answers, strict=True):
        may_end = state and state not in ENDING and not gateways.believes(name)
        if may_end or (state == b"draining" and int(num_streams or 0) and not has_standby):
            return True
    return False
