"""Killed pool: workers and batchers that can be killed one by one; the next one is there at once.

Workers are the real agents over an engine without a model, in this process. Batchers are processes.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack

from redis.asyncio import Redis

from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import modeless_worker

KEYS = Keys("default")


class KilledPool:
    """The workers and batchers of a run. `kills`: by kind."""

    def __init__(self, url: str, redis: Redis, num_workers: int, step_s: float, num_blocks: int) -> None:
        self.url = url
        self.redis = redis
        self.num_workers = num_workers
        self.step_s = step_s
        self.num_blocks = num_blocks
        self.workers: dict[str, AsyncExitStack] = {}
        self.batchers: dict[str, ExitStack] = {}
        self.num_started = 0
        self.kills = Counter[str]()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for name in ("b0", "b1"):
            self.start_batcher(name)
        for _ in range(self.num_workers):
            await self.start_worker()
        try:
            yield
        finally:
            for worker in self.workers.values():
                await worker.aclose()
            for one in self.batchers.values():
                one.close()

    async def start_worker(self) -> None:
        name = f"w{self.num_started}"
        self.num_started += 1
        self.workers[name] = AsyncExitStack()
        await self.workers[name].enter_async_context(
            modeless_worker(self.url, name, num_blocks=self.num_blocks, step_s=self.step_s)
        )

    def start_batcher(self, name: str) -> None:
        self.batchers[name] = ExitStack()
        self.batchers[name].enter_context(batcher(self.url, name, WORKER_TTL_S="60", LOG_LEVEL="error"))

    async def kill_worker(self, name: str) -> None:
        """Kill a worker, wherever its tasks are. The batcher is told, as a launcher tells it."""
        await self.workers.pop(name).aclose()
        self.kills["worker"] += 1
        await self.redis.xadd(KEYS.control, {"died": encode(WorkerDied(f"{name}-1"))})
        await self.start_worker()

    async def kill_batcher(self, name: str) -> None:
        await asyncio.to_thread(self.batchers.pop(name).close)
        self.kills["batcher"] += 1
        if (await self.redis.get(KEYS.batcher) or b"").startswith(name.encode()):
            await self.redis.delete(KEYS.batcher)
        await asyncio.to_thread(self.start_batcher, name)
