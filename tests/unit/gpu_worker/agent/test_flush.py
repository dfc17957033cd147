"""What a flush writes to the broker."""

import logging

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.broker.committed import read
from common.broker.pool_client import PoolClient
from common.broker.worker_scripts import FlushReply
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids, unpack_records
from gpu_worker.agent import flush
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Flush, Sealed
from tests.support.agents import CHANNEL, KEYS, reports, start, step
from tests.support.broker.listening import listening
from tests.support.broker_state import seal
from tests.support.tokenizer import ids as ids_of


async def test_tokens_ends_and_releases_are_published_in_one_flush(agent: Agent, redis: Redis) -> None:
    async with listening(redis, CHANNEL) as published:
        await start(agent, max_new_tokens=2)
        first, second = ids_of(" the sea")
        step(agent, {1: (0, first)}, prefilled=[(1, 2)])
        step(agent, {1: (1, second)}, ended=[(1, "length", 2)], released=[(1, 3)])
        await agent.flusher.flush()
        events = [decode(Events, message) for message in await published()]
    assert [event.sequence for event in events] == [1, 2]
    (tokens,) = events[0].all_tokens
    assert (tokens.index, unpack_ids(tokens.ids), tokens.texts) == (0, [first, second], [" the", " sea"])
    [(_, fields)] = await redis.xrange(KEYS.log("w0-1"), min="1")
    assert decode(Events, fields[f"entry:{CHANNEL}".encode()]) == events[0]
    assert (events[1].terminals[0].reason, events[1].terminals[0].num_tokens) == ("length", 2)
    assert unpack_records(await redis.get(KEYS.tokens("r1"))) == ([first, second], [-0.5, -0.5], [])
    (report,) = await reports(redis)
    assert (report.prefilled, report.ended, report.released) == ([(1, 2, 1)], [(1, "length", 2)], [(1, 3)])
    assert not agent.state.table.rows


async def test_a_report_says_how_long_steps_of_each_kind_took(agent: Agent, redis: Redis) -> None:
    await start(agent)
    step(agent, prefill_tokens=64, duration_ms=20.0)
    step(agent, {1: (0, 5)}, prefilled=[(1, 2)], prefill_tokens=32, duration_ms=12.0)
    step(agent, {1: (1, 6)}, prefill_tokens=8, duration_ms=9.0)
    step(agent, {1: (2, 6)}, duration_ms=5.0)
    step(agent, {1: (3, 6)}, duration_ms=7.0)
    step(agent)
    agent.state.outbox.takeover = True
    await agent.flusher.flush()
    agent.state.outbox.takeover = True
    await agent.flusher.flush()
    first, second = await reports(redis)
    assert sorted(first.step_times) == [(1, 1, 8, 9.0), (2, 0, 96, 32.0), (2, 2, 0, 12.0)]
    assert first.step_times[0] == (2, 2, 0, 12.0), "what decode takes is known before what prefill adds"
    assert second.step_times == []


async def test_a_preempted_row_is_spilled_and_has_no_terminal(agent: Agent, redis: Redis) -> None:
    await start(agent)
    step(agent, {1: (0, 5)})
    await agent.flusher.flush()
    step(agent, {1: (1, 6)}, ended=[(1, "preempted", 2)], released=[(1, 3)])
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == [5, 6]
    assert not await redis.hexists(KEYS.request("r1"), "terminal")  # type: ignore[misc]


async def test_the_log_is_bounded_and_loses_no_token(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1000)
    for index in range(200):
        step(agent, {1: (index, index)})
        await agent.flusher.flush()
    assert await redis.xlen(KEYS.log("w0-1")) <= 65
    committed = (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]
    assert unpack_records(committed.records)[0] == list(range(200))


async def test_a_sealed_agent_publishes_nothing(agent: Agent, redis: Redis) -> None:
    await start(agent)
    await seal(redis, "w0-1")
    step(agent, {1: (0, 5)}, ended=[(1, "length", 1)])
    with pytest.raises(Sealed):
        await agent.flusher.flush()
    with pytest.raises(Sealed):
        await agent.send_heartbeat()
    assert not await redis.hexists(KEYS.request("r1"), "terminal")  # type: ignore[misc]


async def test_a_key_of_the_wrong_type_does_not_stop_other_terminals(agent: Agent, redis: Redis) -> None:
    await start(agent, row=1)
    await start(agent, row=2)
    await redis.delete(KEYS.request("r1"))
    await redis.set(KEYS.request("r1"), "x")
    step(agent, {1: (0, 5), 2: (0, 6)}, ended=[(1, "length", 1), (2, "length", 1)])
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r2")))[0] == [6]


async def test_a_flush_that_fails_for_long_is_said_once_and_so_is_its_end(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, failures = agent.publisher.write, [RedisError("away")] * 5

    async def fail_first(flush: Flush) -> FlushReply:
        if failures:
            raise failures.pop()
        return await write(flush)

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(agent.publisher, "write", fail_first)
    monkeypatch.setattr(flush, "RETRY_S", 0.0)
    await start(agent)
    step(agent, {1: (0, 5)})
    await agent.flusher.flush()
    said, over = [message for message in caplog.messages if message.startswith("a flush")]
    assert said == "a flush failed, trying again: the broker refused (away)"
    assert over.startswith("a flush has succeeded again, after 5 failures in ")
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].records
