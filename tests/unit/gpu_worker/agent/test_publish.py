"""The publisher: contents of a flush, and the rows after it is written."""

import pytest
from redis.asyncio import Redis

from common.messages.codec import decode
from common.messages.events import LogEntry
from common.messages.packing import unpack_ids
from gpu_worker.agent import publish
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.publish import StreamsGone
from tests.support.agents import KEYS, start, step


async def test_every_flush_has_the_next_sequence_number(agent: Agent) -> None:
    flushes = [agent.publisher.build(Outbox(), None, 0, []) for _ in range(3)]
    assert [flush.sequence for flush in flushes] == [1, 2, 3]


async def test_the_log_entry_has_no_text(agent: Agent) -> None:
    await start(agent)
    step(agent, {1: (0, 5)})
    flush = agent.publisher.build(agent.state.outbox, None, 0, [])
    [tokens] = decode(LogEntry, flush.entry).tokens
    assert (unpack_ids(tokens.ids), tokens.texts) == ([5], [])


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
