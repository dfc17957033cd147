"""Signs of life: what a process says of itself, now and then, for as long as it lives. A worker's own way is
`worker_heartbeat.lua`.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable

from redis.asyncio import Redis

from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error, script
from common.broker.keys import Keys

log = logging.getLogger(__name__)

LAST_HEARTBEAT_S = 1.0

HeartbeatFields = dict[str, str | int]


def process_fields() -> HeartbeatFields:
    """Where this process is found."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


class Heartbeat:
    """The sign of life of one process that is no worker: it stands in Redis for `ttl_s`, unless it is shown
    again or taken away.
    """

    def __init__(self, redis: Redis, keys: Keys, kind: str, name: str, ttl_s: float) -> None:
        self.redis, self.ttl_ms = redis, round(ttl_s * 1000)
        self.member = f"{kind}:{name}"
        self.keys = [keys.process(kind, name), keys.processes]
        self.script = script(redis, "heartbeat")

    async def show(self, **figures: str | int) -> None:
        said = [word for pair in (process_fields() | figures).items() for word in pair]
        await self.script(keys=self.keys, args=[self.member, self.ttl_ms, *said])

    async def show_for_ever(self, every_s: float, figures: Callable[[], HeartbeatFields]) -> None:
        """Never returns; a broker that is away may come back."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self.show(**figures())
            except ERRORS as error:
                log.debug("no sign of life: %s", describe_error(error))
            await asyncio.sleep(every_s)

    @contextlib.asynccontextmanager
    async def shown(
        self, every_s: float, figures: Callable[[], HeartbeatFields] = dict
    ) -> AsyncIterator[None]:
        """Shown while the context is open, and taken away at its end."""
        showing = asyncio.create_task(self.show_for_ever(every_s, figures))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait([showing])
            with contextlib.suppress(*ERRORS):
                async with asyncio.timeout(LAST_HEARTBEAT_S):
                    await self.take_away()

    async def take_away(self) -> None:
        async with self.redis.pipeline() as pipe:
            pipe.delete(self.keys[0])
            pipe.zrem(self.keys[1], self.member)
            await pipe.execute()
