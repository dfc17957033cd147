"""The publisher: contents of a flush, what its readers read of it, and the rows after it is written."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.broker.committed import logged_messages
from common.broker.heartbeat import TOKEN_COLUMNS_SINCE, WIRE_VERSION, Heartbeat, Readers
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids
from gpu_worker.agent import publish
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import StreamsGone
from gpu_worker.agent.state import Outbox
from tests.support.agents import CHANNEL, KEYS, start, step


async def test_every_flush_has_the_next_sequence_number(agent: Agent) -> None:
    flushes = [agent.publisher.build(Outbox(), None, 0, []) for _ in range(3)]
    assert [flush.sequence for flush in flushes] == [1, 2, 3]


async def test_the_log_has_what_is_published_and_tokens_that_nobody_reads(agent: Agent, redis: Redis) -> None:
    await start(agent, row=1)
    await start(agent, row=2)
    agent.state.table.rows[2].request = replace(agent.state.table.rows[2].request, channel="")
    step(agent, {1: (0, 5), 2: (0, 6)})
    flush = agent.publisher.build(agent.state.outbox, None, 0, [])
    assert await agent.publisher.write(flush) == ("OK", [])
    [(_, fields)] = await redis.xrange(KEYS.log("w0-1"), min="1")
    logged = [decode(Events, message) for message in logged_messages(fields)]
    assert {(unpack_ids(one.all_tokens[0].ids)[0], one.sequence) for one in logged} == {(5, 1), (6, 0)}
    assert [message for _, message in flush.messages] == [*logged_messages(fields)]
    assert [*agent.publisher.channels.last_number] == [CHANNEL]


async def test_single_tokens_after_the_first_are_published_in_columns(agent: Agent) -> None:
    await start(agent, row=1)
    await start(agent, row=2)
    step(agent, {1: (0, 5)})
    events = [decode_only_message(agent)]
    step(agent, {1: (1, 6), 2: (0, 7)})
    events.append(decode_only_message(agent))
    step(agent, {1: (2, 8), 2: (1, 9)})
    step(agent, {2: (2, 10)})
    events.append(decode_only_message(agent))
    sent = [([one.request_id for one in event.tokens], event.columns) for event in events]
    assert [others for others, _ in sent] == [["r1"], ["r2"], ["r2"]]
    assert [columns and (columns.request_ids, columns.indices) for _, columns in sent] == [
        None,
        (["r1"], [1]),
        (["r1"], [2]),
    ]
    ids = {(one.request_id, one.index): unpack_ids(one.ids) for event in events for one in event.all_tokens}
    assert ids == {("r1", 0): [5], ("r1", 1): [6], ("r2", 0): [7], ("r1", 2): [8], ("r2", 1): [9, 10]}


def decode_only_message(agent: Agent) -> Events:
    outbox, agent.state.outbox = agent.state.outbox, Outbox()
    [(_, message)] = agent.publisher.build(outbox, None, 0, []).messages
    return decode(Events, message)


async def test_live_rows_are_spilled_at_intervals(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "SPILL_EVERY", 3)
    await start(agent)
    row = agent.state.table.rows[1]
    spilled = []
    for index in range(4):
        step(agent, {1: (index, 5)})
        await agent.flusher.flush()
        spilled.append(row.num_spilled)
    assert spilled == [0, 0, 3, 3]
    assert await redis.strlen(KEYS.tokens("r1")) == 3 * 8


async def test_the_method_is_prefill_where_a_prompt_was_computed(agent: Agent) -> None:
    decoded = agent.publisher.build(Outbox(), None, 0, [])
    prefilled = agent.publisher.build(Outbox(prefilled=[(1, 4, 1)]), None, 0, [])
    assert (decoded.method, prefilled.method) == ("decode", "prefill")


async def test_a_flush_may_be_written_twice(agent: Agent, redis: Redis) -> None:
    await start(agent)
    step(agent, {1: (0, 5)})
    flush = agent.publisher.build(agent.state.outbox, None, 0, [])
    await agent.publisher.write(flush)
    await agent.publisher.write(flush)
    assert await redis.xlen(KEYS.log("w0-1")) == 2, "the entry that creates the stream, and the flush"


async def test_a_flush_without_streams_is_refused(agent: Agent, redis: Redis) -> None:
    flush = agent.publisher.build(Outbox(), None, 0, [])
    await redis.delete(KEYS.log("w0-1"), KEYS.reports("w0-1"))
    with pytest.raises(StreamsGone):
        await agent.publisher.write(flush)


async def test_the_oldest_reader_that_is_alive_counts(redis: Redis) -> None:
    pool = PoolClient(redis, KEYS)
    readers = Readers(pool)
    assert await readers.lowest_version() == WIRE_VERSION, "nobody reads yet"
    await Heartbeat(pool, "gateway", "g0-a", 60).send()
    await Heartbeat(pool, "worker", "w9-a", 60).send(wire=1)
    assert await readers.lowest_version() == WIRE_VERSION, "no worker reads what others write"
    for kind, name in (("batcher", "b0-old"), ("gateway", "g1-old")):
        old = Heartbeat(pool, kind, name, 60)
        await old.send()
        await redis.hdel(KEYS.process(kind, name), "wire")  # type: ignore[misc]
        assert await readers.lowest_version() == 1
        await redis.delete(KEYS.process(kind, name))
        assert await readers.lowest_version() == WIRE_VERSION, "it has died, and its name stays in the list"


async def test_a_worker_writes_no_columns_while_an_old_reader_lives(agent: Agent, redis: Redis) -> None:
    await start(agent, row=1)
    step(agent, {1: (0, 5)})
    assert has_columns(agent) is False, "first tokens never are"
    step(agent, {1: (1, 6)})
    assert has_columns(agent)
    agent.publisher.set_wire_version(TOKEN_COLUMNS_SINCE - 1)
    step(agent, {1: (2, 7)})
    rows = [*agent.state.table.rows.values()]
    outbox, agent.state.outbox = agent.state.outbox, Outbox()
    flush = agent.publisher.build(outbox, None, 0, rows)
    [(_, message)] = flush.messages
    assert decode(Events, message).columns is None
    assert flush.mode == "trim" and [spill.num_tokens for spill in flush.spills] == [3], (
        "columns leave the log"
    )
    agent.publisher.set_wire_version(WIRE_VERSION)
    step(agent, {1: (3, 8)})
    assert has_columns(agent)


def has_columns(agent: Agent) -> bool:
    outbox, agent.state.outbox = agent.state.outbox, Outbox()
    [(_, message)] = agent.publisher.build(outbox, None, 0, []).messages
    return decode(Events, message).columns is not None
