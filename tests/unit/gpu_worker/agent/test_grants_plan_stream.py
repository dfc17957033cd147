"""PlanStream: every entry once, in order, and a read that waits before it is asked for."""

import asyncio
import random

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from common.broker.keys import parse_stream_id
from gpu_worker.agent.grants import Entry, PlanStream, StreamId
from tests.support.waiting import wait_until


async def read_to(stream: PlanStream, last: StreamId) -> list[StreamId]:
    """The ids that come up to the last one."""
    ids: list[StreamId] = []
    async with asyncio.timeout(30):
        while stream.last != last:
            ids += [parse_stream_id(entry_id) for entry_id, _ in await stream.next()]
    return ids


async def test_every_entry_comes_once_and_in_order_whatever_epochs_begin(redis: Redis) -> None:
    stream, rng = PlanStream(redis, "s"), random.Random(1)
    ids = [(epoch, number) for epoch in (1, 2, 5) for number in range(1, 30)]

    async def write() -> None:
        for epoch, number in ids:
            await redis.xadd("s", {"plan": b""}, id=f"{epoch}-{number}")
            await asyncio.sleep(rng.choice([0, 0, 0.002]))

    read, _ = await asyncio.gather(read_to(stream, ids[-1]), write())
    assert read == ids
    stream.close()


async def test_a_read_waits_for_the_next_entry_before_the_last_one_is_taken(redis: Redis) -> None:
    stream = PlanStream(redis, "s")
    await redis.xadd("s", {"plan": b""}, id="1-1")
    await redis.xadd("s", {"plan": b""}, id="1-2")
    await read_to(stream, (1, 2))
    following = asyncio.create_task(read_to(stream, (1, 3)))
    await wait_until(lambda: len(stream.reads) == 2 and min(stream.reads) == (1, 2))
    await redis.xadd("s", {"plan": b""}, id="1-3")
    assert await following == [(1, 3)]
    waiting = stream.reads[1, 3]
    await redis.xadd("s", {"plan": b""}, id="1-4")
    assert [entry_id for entry_id, _ in await waiting] == [b"1-4"]
    assert await read_to(stream, (1, 4)) == [(1, 4)]
    stream.close()


async def test_a_lost_connection_fails_one_read_only(redis: Redis) -> None:
    """Else the error of the read ahead would hold up a later plan."""
    stream = PlanStream(redis, "s")
    stream.reads = {after: asyncio.create_task(fail()) for after in [(0, 0), (0, 1)]}
    with pytest.raises(ConnectionError):
        await stream.next()
    await redis.xadd("s", {"plan": b""}, id="1-1")
    assert await read_to(stream, (1, 1)) == [(1, 1)]
    await redis.xadd("s", {"plan": b""}, id="1-2")
    assert await read_to(stream, (1, 2)) == [(1, 2)]
    stream.close()


async def fail() -> list[Entry]:
    raise ConnectionError("cut")
