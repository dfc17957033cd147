"""The fleet's figures: one hash in the broker, to which every process adds what it has counted, so that they
outlive it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from redis.asyncio import Redis

from common.broker.client import ERRORS, describe_error
from common.broker.keys import METRICS_TTL_MS, Keys
from common.metrics.exposition import own_values

log = logging.getLogger(__name__)
ADD_S = 1.0
LAST_WORD_S = 1.0


class MetricsPublisher:
    """What this process counts from now on, and how much of it has been added. What it counts while the
    broker is away is added when that is back; when an answer gets lost, one second may be counted twice.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys
        self.added = own_values()

    async def run(self, over: asyncio.Event) -> None:
        """Adds now and then, and once more when it is over. (Who is cancelled does not know whether what was
        sent has been added.)
        """
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), ADD_S)
            last = over.is_set()
            try:
                await self.add()
            except ERRORS as error:
                log.debug("figures wait: %s", describe_error(error))

    async def add(self) -> None:
        """Adds what is new. A number that the broker refuses (somebody wrote another thing there) stays new,
        and hinders no other.
        """
        changed = {name: value for name, value in own_values().items() if value != self.added.get(name, 0.0)}
        if not changed:
            return
        async with self.redis.pipeline(transaction=False) as pipe:
            for name, value in changed.items():
                pipe.hincrbyfloat(self.keys.metrics, name, value - self.added.get(name, 0.0))
            pipe.pexpire(self.keys.metrics, METRICS_TTL_MS)
            *sums, _ = await pipe.execute(raise_on_error=False)
        self.added |= {
            name: value
            for (name, value), total in zip(changed.items(), sums, strict=True)
            if not isinstance(total, Exception)
        }


@contextlib.asynccontextmanager
async def publishing_metrics(redis: Redis, keys: Keys) -> AsyncIterator[None]:
    """What this process counts is added to the pool's figures while the context is open; the last of it when
    it closes.
    """
    over = asyncio.Event()
    task = asyncio.create_task(MetricsPublisher(redis, keys).run(over))
    try:
        yield
    finally:
        over.set()
        await asyncio.wait([task], timeout=LAST_WORD_S)
        task.cancel()


async def read_totals(redis: Redis, keys: Keys) -> dict[str, float]:
    """What all processes have counted, dead ones included. What is no number is left out."""
    found: dict[bytes, bytes] = await redis.hgetall(keys.metrics)  # type: ignore[misc]
    values = {}
    for name, value in found.items():
        with contextlib.suppress(ValueError):
            values[name.decode()] = float(value)
    return values
