"""Terminals: the batcher's own terminals, published once, and the queue entries that go with them."""

import msgpack
import pytest
from redis.asyncio import Redis

from batcher.inbox import StreamEntry
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.terminals import Terminals
from batcher.timeline import TimelineWriter
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import ChannelSequences, Events
from common.messages.records import RECORD
from tests.support.broker.listening import listening
from tests.support.broker_state import KEYS, admit, error_of, make_request

CHANNEL = KEYS.events("g")


@pytest.fixture
def terminals(redis: Redis) -> Terminals:
    scheduler = Scheduler(WorkerLimits(), epoch=1)
    pool = PoolClient(redis, KEYS)
    timeline = TimelineWriter(pool, lambda: 1000)
    return Terminals(pool, ChannelSequences("b0-1"), scheduler, timeline)


async def queue(redis: Redis, terminals: Terminals, request_id: str) -> Sequence:
    """Queue a request and register its sequence."""
    request = make_request(request_id, channel=CHANNEL)
    entry_id = await admit(redis, request)
    sequence = Sequence(request, entry_id, 10**15)
    terminals.scheduler.register(sequence)
    return sequence


async def published(redis: Redis, *actions: object) -> list[Events]:
    """Events published on CHANNEL while the coroutines `actions` run."""
    async with listening(redis, CHANNEL) as messages:
        for action in actions:
            await action  # type: ignore[misc]
        return [decode(Events, message) for message in await messages()]


async def test_finish_publishes_stores_and_dequeues(redis: Redis, terminals: Terminals) -> None:
    sequence = await queue(redis, terminals, "r1")
    sequence.commit(RECORD.pack(7, -1.0) * 3)
    await redis.set(KEYS.tokens("r1"), sequence.records)
    [events] = await published(redis, terminals.finish(sequence, "timeout"))
    [terminal] = events.terminals
    assert (events.source, events.sequence) == ("b0-1", 1)
    assert (terminal.request_id, terminal.reason, terminal.error_type) == ("r1", "error", "timeout")
    assert terminal.num_tokens == 3
    assert await redis.hmget(KEYS.request("r1"), ["terminal", "error_type"]) == [b"error", b"timeout"]  # type: ignore[misc]
    assert await redis.exists(KEYS.requests, KEYS.places, KEYS.tokens("r1")) == 1, "an empty stream"
    assert await redis.xlen(KEYS.requests) == 0
    assert terminals.scheduler.sequences == {}
    assert [event.what for event in terminals.timeline.unwritten["r1"]] == ["ended"]


async def test_a_second_terminal_is_not_published(redis: Redis, terminals: Terminals) -> None:
    sequence = await queue(redis, terminals, "r1")
    events = await published(
        redis, terminals.finish(sequence, "client"), terminals.finish(sequence, "timeout")
    )
    assert [terminal.reason for event in events for terminal in event.terminals] == ["cancelled"]
    assert await error_of(redis, "r1") == b"cancelled: client"


async def test_dequeue_frees_one_entry_however_often_it_runs(redis: Redis, terminals: Terminals) -> None:
    first, second = [await queue(redis, terminals, name) for name in ("r1", "r2")]
    assert not await terminals.dequeue(first), "it has not ended"
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    for _ in range(2):
        assert await terminals.dequeue(first)
    assert [entry_id.decode() for entry_id, _ in await redis.xrange(KEYS.requests)] == [second.entry_id]
    assert await redis.hget(KEYS.places, "all") == b"1"  # type: ignore[misc]
    assert list(terminals.scheduler.sequences) == ["r2"]


async def test_an_undecodable_entry_with_an_id_gets_a_terminal(redis: Redis, terminals: Terminals) -> None:
    payload = msgpack.packb({"v": 99, "id": "r1"})
    entry_id = await admit(redis, make_request("r1", channel=CHANNEL), payload)
    entry = StreamEntry(KEYS.requests, entry_id, {b"generate": payload})
    [events] = await published(redis, terminals.finish_undecodable(entry))
    assert [terminal.error_type for terminal in events.terminals] == ["generation"]
    assert await redis.xlen(KEYS.requests) == 0 and not await redis.exists(KEYS.places)


async def test_an_undecodable_entry_without_an_id_is_removed(redis: Redis, terminals: Terminals) -> None:
    entry_id = await redis.xadd(KEYS.requests, {"generate": b"\xc1"})
    entry = StreamEntry(KEYS.requests, entry_id.decode(), {b"generate": b"\xc1"})
    assert await published(redis, terminals.finish_undecodable(entry)) == []
    assert await redis.xlen(KEYS.requests) == 0
