"""The workers of the pool: who is there, who answered this epoch, who shows no sign of life."""

import logging
import time

from redis.asyncio import Redis

from batcher.dispatch import Dispatch
from batcher.inbox import Inbox
from batcher.scheduler import Scheduler
from common.broker.client import script
from common.broker.keys import Keys
from common.messages.codec import WireError, decode
from common.messages.plan import Report, WorkerCapacity

log = logging.getLogger(__name__)
CLOCK_JUMP_MS = 1000
STALL_S = 2.0


class Fleet:
    """Every worker is taken over first: it drops what it holds, says so, and only then is given rows.

    Attributes:
        greeted: capacity of each worker that a takeover was sent to.
        settled: incarnations of which nothing unexpected can come any more: they answered, or are dead and
            read to the end.
        unsettled: incarnations from before this epoch of which that is not known yet.
        unreadable: incarnations that speak another version of the wire: nothing can be given to them.
    """

    def __init__(
        self, redis: Redis, keys: Keys, inbox: Inbox, dispatch: Dispatch, scheduler: Scheduler, ttl_s: float
    ) -> None:
        self.redis, self.keys, self.inbox, self.dispatch, self.scheduler, self.ttl_s = (
            redis,
            keys,
            inbox,
            dispatch,
            scheduler,
            ttl_s,
        )
        self.seal_script = script(redis, "seal")
        self.greeted: dict[str, WorkerCapacity] = {}
        self.settled: set[str] = set()
        self.unsettled: set[str] = set()
        self.unreadable: set[str] = set()
        self.clock_offset_ms: float | None = None
        self.looked_s = time.monotonic()
        self.trusted_from = 0.0
        self.distrust()

    def distrust(self) -> None:
        """The broker was away, so signs of life may be missing: no verdicts for one TTL."""
        self.trusted_from = time.monotonic() + self.ttl_s

    @property
    def trusting(self) -> bool:
        return time.monotonic() >= self.trusted_from

    def heed_stall(self) -> None:
        """Whoever waited long for the broker (it loads, its disk is busy, it or we were stopped) may not
        blame others for their silence.
        """
        now = time.monotonic()
        if now - self.looked_s > STALL_S:
            log.warning("nothing was heard of the broker for %.1f s", now - self.looked_s)
            self.distrust()
        self.looked_s = now

    def heed_clock(self, now_ms: int) -> None:
        """The broker's clock decides when a sign of life expires: after it has jumped, they may all have."""
        offset_ms = now_ms - time.monotonic() * 1000
        if self.clock_offset_ms is not None and abs(offset_ms - self.clock_offset_ms) > CLOCK_JUMP_MS:
            log.warning("the broker's clock jumped by %.1f s", (offset_ms - self.clock_offset_ms) / 1000)
            self.distrust()
        self.clock_offset_ms = offset_ms

    def now_ms(self) -> int:
        """The broker's clock, as last looked at."""
        return round(time.monotonic() * 1000 + (self.clock_offset_ms or 0.0))

    async def members(self) -> list[str]:
        return [member.decode() for member in await self.redis.zrange(self.keys.workers, 0, -1)]

    async def begin(self) -> None:
        self.unsettled = set(await self.members())
        for incarnation in self.unsettled:
            await self.greet(incarnation)

    async def greet(self, incarnation: str) -> None:
        """Sends the takeover to a worker that shows signs of life, once; notes that a worker wants to leave."""
        state, capacity = await self.redis.hmget(self.keys.worker(incarnation), ["state", "capacity"])  # type: ignore[misc]
        if state == b"draining":
            self.scheduler.drain(incarnation)
        if state is None or incarnation in self.greeted:
            return
        try:
            worker = decode(WorkerCapacity, capacity)
        except WireError as error:
            if incarnation not in self.unreadable:
                log.error("worker %s announces itself in words that cannot be read: %s", incarnation, error)
            self.unreadable.add(incarnation)
            return
        if await self.dispatch.takeover(incarnation, self.scheduler.epoch) == "OK":
            self.greeted[incarnation] = worker
            self.inbox.follow(self.keys.reports(incarnation))

    def hear(self, incarnation: str, report: Report) -> None:
        """Takes in a report; the answer to our takeover makes the worker one of ours."""
        if incarnation in self.scheduler.replicas:
            self.scheduler.take_in(incarnation, report)
        elif report.takeover and report.epoch == self.scheduler.epoch and incarnation in self.greeted:
            replica = self.scheduler.join(self.greeted[incarnation])
            replica.step = replica.until = report.step
            self.settled.add(incarnation)
            self.unsettled.discard(incarnation)
            log.info(
                "worker %s joined: %d blocks of %d tokens",
                incarnation,
                replica.pool.num_blocks,
                replica.block_size,
            )

    async def look(self) -> list[str]:
        """Greets workers that nobody told us of. Returns those that are to be sealed: they show no sign of
        life, or hold rows but cannot be asked for them.
        """
        incarnations = sorted({*await self.members(), *self.greeted, *self.unsettled})
        async with self.redis.pipeline(transaction=False) as pipe:
            for incarnation in incarnations:
                pipe.hget(self.keys.worker(incarnation), "state")
            states = await pipe.execute()
        self.heed_stall()
        for incarnation, state in zip(incarnations, states, strict=True):
            if state == b"draining" or (state is not None and incarnation not in self.greeted):
                await self.greet(incarnation)
        gone = {
            incarnation
            for incarnation, state in zip(incarnations, states, strict=True)
            if state is None and self.trusting
        }
        return sorted(gone | (self.unreadable & self.unsettled))

    async def seal(self, incarnation: str) -> bool:
        """Ends an incarnation: nothing can be appended to its logs after this. Returns whether there are such
        logs.
        """
        keys = [
            self.keys.log(incarnation),
            self.keys.reports(incarnation),
            self.keys.worker(incarnation),
            self.keys.workers,
        ]
        return bool(await self.seal_script(keys=keys, args=[incarnation]))

    def is_buried(self, incarnation: str) -> bool:
        return incarnation in self.settled and incarnation not in self.greeted

    async def bury(self, incarnation: str) -> None:
        """Removes what is left of a sealed incarnation; it has been read to the end."""
        await self.redis.delete(
            self.keys.log(incarnation), self.keys.reports(incarnation), self.keys.plans(incarnation)
        )
        self.inbox.drop(self.keys.reports(incarnation))
        self.greeted.pop(incarnation, None)
        self.unsettled.discard(incarnation)
        self.settled.add(incarnation)
