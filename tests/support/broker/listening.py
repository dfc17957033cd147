"""Messages of channels, as far as they have been published."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from tests.support.waiting import PATIENCE_S

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
