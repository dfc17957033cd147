"""What a gateway knows of the workers, and its own sign of life."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from api.errors import unavailable
from api.inference.validate import Limits
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.broker.keys import Keys
from common.messages.codec import WireError, decode
from common.messages.plan import WorkerCapacity
from common.process.heartbeat import Heartbeat
from common.settings.settings import Settings

log = logging.getLogger(__name__)
FRESH_S = 0.05
TTL_SHARE = 0.8
"""A gateway's sign of life is gone before WORKER_TTL_S is over: there is time left for others to take its
jobs over.
"""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker as Redis shows it; `age_s` since its last sign of life."""

    ready: bool
    age_s: float
    capacity: WorkerCapacity


class WorkerMonitor:
    """Looks at the workers every heartbeat. What was learnt of them is kept when they die.

    Attributes:
        ready_s: monotonic time of the last sign of life of a worker that was ready; None before there was
            one.
        max_total_tokens: of the smallest worker.
        trouble: why the last look failed; empty when it did not.
    """

    def __init__(
        self, redis: Redis, keys: Keys, gateway: str, settings: Settings, num_streams: Callable[[], int]
    ) -> None:
        self.redis, self.keys, self.settings = redis, keys, settings
        self.sign = Heartbeat(redis, keys, "gateway", gateway, TTL_SHARE * settings.worker_ttl_s)
        self.num_streams = num_streams
        self.ready_s: float | None = None
        self.max_total_tokens = 0
        self.last_error = "not connected to the broker yet"
        self.looked_s = 0.0
        self.looking = asyncio.Lock()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.look()
            await asyncio.sleep(self.settings.heartbeat_s)

    async def look(self) -> None:
        """One sign of life, one look."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.say_alive()
                self.learn(await self.sightings())
            self.last_error = ""
        except ERRORS as error:
            if self.last_error != describe_error(error):
                self.last_error = describe_error(error)
                log.warning("cannot look at the workers: %s", self.last_error)
        self.looked_s = time.monotonic()

    async def look_again(self) -> None:
        """A look, unless somebody has had one just now."""
        async with self.looking:
            if time.monotonic() - self.looked_s > FRESH_S:
                await self.look()

    async def say_alive(self) -> None:
        """Our sign of life, with what we hold."""
        await self.sign.send(state="ready", streams=self.num_streams(), tasks=len(asyncio.all_tasks()))

    async def remove_heartbeat(self) -> None:
        """Takes the sign of life away: this gateway has no requests any more."""
        try:
            async with asyncio.timeout(1.0):
                await self.sign.remove()
        except ERRORS as error:
            log.warning("the sign of life stays until it expires: %s", describe_error(error))

    async def sightings(self) -> list[Sighting]:
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.zrange(self.keys.workers, 0, -1, withscores=True)
            (seconds, microseconds), seen = await pipe.execute()
        now_ms = seconds * 1000 + microseconds / 1000
        async with self.redis.pipeline(transaction=False) as pipe:
            for incarnation, _ in seen:
                pipe.hmget(self.keys.worker(incarnation.decode()), ["state", "capacity"])
            hashes = await pipe.execute()
        found = []
        for (incarnation, seen_ms), (state, capacity) in zip(seen, hashes, strict=True):
            if state is None or capacity is None:
                continue
            try:
                found.append(
                    Sighting(state == b"ready", (now_ms - seen_ms) / 1000, decode(WorkerCapacity, capacity))
                )
            except WireError as error:
                log.error("worker %s: %s", incarnation.decode(), error)
        return found

    def learn(self, sightings: list[Sighting]) -> None:
        ready = [one for one in sightings if one.ready]
        if ready:
            self.ready_s = max(self.ready_s or 0.0, time.monotonic() - min(one.age_s for one in ready))
            self.max_total_tokens = min(one.capacity.max_total_tokens for one in ready)

    def check(self) -> None:
        """Raises ApiError (503) when a request would only wait for a worker that does not come."""
        if self.last_error:
            raise unavailable(self.last_error)
        if self.ready_s is None:
            raise unavailable("no worker is ready yet")
        gone_s = time.monotonic() - self.ready_s
        if gone_s > self.settings.worker_grace_s:
            raise unavailable(f"no worker for {gone_s:.0f} s")

    @property
    def limits(self) -> Limits:
        """Meaningful after `check`."""
        max_total_tokens = min(self.settings.max_total_tokens or self.max_total_tokens, self.max_total_tokens)
        max_input_tokens = min(self.settings.max_input_tokens or max_total_tokens, max_total_tokens - 1)
        return Limits(
            max_input_tokens,
            max_total_tokens,
            self.settings.max_stop_sequences,
            self.settings.max_top_n_tokens,
            self.settings.max_best_of,
            self.settings.max_client_batch_size,
        )
