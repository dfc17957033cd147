"""What comes over a channel; and a pool that says of itself that it serves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from common.broker.client import ERRORS, connect
from common.broker.directory import DirectoryClient, PoolEntry, address_of
from tests.support.waiting import PATIENCE_S, in_background

MARK = b"all that was published before has come"

Published = Callable[[], Awaitable[list[bytes]]]
"""Returns what was published since the last call, in order."""


@contextlib.asynccontextmanager
async def listening(redis: Redis, *channels: str) -> AsyncIterator[Published]:
    """Listen to channels; they are subscribed when the context opens. A mark is published after the messages,
    so a read needs no guess about how long they take to come.
    """
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(*channels)
        for _ in channels:
            assert (await next_message(pubsub))["type"] == "subscribe"

        async def published() -> list[bytes]:
            await redis.publish(channels[0], MARK)
            found: list[bytes] = []
            while (data := (await next_message(pubsub))["data"]) != MARK:
                found.append(data)
            return found

        yield published


async def next_message(pubsub: PubSub) -> dict[str, Any]:
    message: dict[str, Any] | None = await pubsub.get_message(timeout=PATIENCE_S)
    assert message is not None, f"no message within {PATIENCE_S} s"
    return message


# --- announced ----------------------------------------------------------------------------------------------

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
    try:
        async with in_background(one.run()):
            yield one
    finally:
        await one.broker.aclose()
        await one.directory.redis.aclose()
