"""Metrics of the whole pool: one hash in the broker, to which every process adds what it counts. The sums
outlive the processes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from common.broker.client import ERRORS, describe_error
from common.broker.keys import METRICS_TTL_MS
from common.broker.pool_client import PoolClient
from common.metrics.exposition import own_values
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

ADD_S = 1.0
"""Time between two additions."""
FINAL_ADD_S = 1.0
"""Time limit of the last addition, at the end of the process."""


class MetricsPublisher:
    """Adds this process's counts to the pool's hash.

    What is counted while the broker is away is added when it is back. If a reply of the broker is lost, one
    second may be counted twice.

    Attributes:
        added: the values that have been added so far.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.added = own_values()

    async def run(self, stopped: asyncio.Event) -> None:
        """Add every ADD_S seconds, and a last time after `stopped` is set. (A cancelled task could not know
        whether the broker has added what was sent.)
        """
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(ADD_S)):
                    await stopped.wait()
            last = stopped.is_set()
            try:
                await self.add()
            except ERRORS as error:
                log.debug("metrics are added later: %s", describe_error(error))

    async def add(self) -> None:
        """Add the counts since the last call. A field that the broker refuses, since something else wrote to
        it, is tried again; other fields are added all the same.
        """
        changed = {name: value for name, value in own_values().items() if value != self.added.get(name, 0.0)}
        if not changed:
            return
        async with self.pool.redis.pipeline(transaction=False) as pipe:
            for name, value in changed.items():
                pipe.hincrbyfloat(self.pool.keys.metrics, name, value - self.added.get(name, 0.0))
            pipe.pexpire(self.pool.keys.metrics, METRICS_TTL_MS)
            *sums, _ = await pipe.execute(raise_on_error=False)
        self.added |= {
            name: value
            for (name, value), total in zip(changed.items(), sums, strict=True)
            if not isinstance(total, Exception)
        }


@contextlib.asynccontextmanager
async def publishing_metrics(pool: PoolClient) -> AsyncIterator[None]:
    """Add this process's counts to the pool's hash while the context is open, and a last time at its end."""
    stopped = asyncio.Event()
    task = asyncio.create_task(MetricsPublisher(pool).run(stopped))
    try:
        yield
    finally:
        stopped.set()
        await asyncio.wait([task], timeout=FINAL_ADD_S)
        task.cancel()


async def read_totals(pool: PoolClient) -> dict[str, float]:
    """Return the sums of all processes, dead ones included, without fields that are no numbers."""
    found: dict[bytes, bytes] = await pool.redis.hgetall(pool.keys.metrics)  # type: ignore[misc]
    values = {}
    for name, value in found.items():
        with contextlib.suppress(ValueError):
            values[name.decode()] = float(value)
    return values
