"""The directory's entry of a pool, as its batcher would write it: scripted workers have none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from common.broker.client import ERRORS, connect
from common.broker.directory import DirectoryClient, PoolEntry, address_of

EVERY_S = 0.1


class Announced:
    """The entry, which a test may change; it is written again and again while the pool's broker answers."""

    def __init__(self, url: str, pool: str, directory_url: str, entry: PoolEntry) -> None:
        self.pool = pool
        self.entry = entry
        self.broker = connect(url)
        self.directory = DirectoryClient(connect(directory_url))

    async def change(self, **fields: Any) -> None:
        self.entry = replace(self.entry, **fields)
        await self.write()

    async def write(self) -> None:
        await self.broker.ping()
        assert await self.directory.publish(self.pool, self.entry) == ""

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*ERRORS):
                await self.write()
            await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def announced(url: str, pool: str, directory_url: str = "", **fields: Any) -> AsyncIterator[Announced]:
    """A pool that is in the directory while the context is open. `directory_url`: its broker's if empty."""
    content: dict[str, Any] = {"model_id": "smollm2", "num_ready": 1, "capacity": 4} | fields
    entry = PoolEntry(address_of(url), **content)
    one = Announced(url, pool, directory_url or url, entry)
    await one.write()
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.wait([task])
        await one.broker.aclose()
        await one.directory.redis.aclose()
