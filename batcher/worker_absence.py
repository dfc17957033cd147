"""WorkerAbsence: since when the pool has had no worker, and whether that is too long for its clients."""

import time
from collections.abc import Callable

from common.broker.pool_client import PoolClient


class WorkerAbsence:
    """Measures how long no worker has been there and none was starting.

    Attributes:
        since_s: monotonic time since when; None while there is one.
    """

    def __init__(self, pool: PoolClient, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self.grace_s = grace_s
        self.clock = clock
        self.since_s: float | None = None

    async def is_over_grace(self, has_worker: bool) -> bool:
        """Whether nobody has been there to serve for longer than WORKER_GRACE_S."""
        if has_worker or await self.is_one_starting():
            self.since_s = None
            return False
        self.since_s = self.clock() if self.since_s is None else self.since_s
        return self.clock() - self.since_s > self.grace_s

    async def is_one_starting(self) -> bool:
        keys = [self.pool.keys.process("starting", name) for name in await self.pool.processes("starting")]
        return bool(keys) and bool(await self.pool.redis.exists(*keys))
