"""What the agent writes to the broker: one flush commits, logs, reports and publishes; what a broker has lost
is written again.

When steps are flushed: in the call that brings a step, whose answer is taken with the next one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker import client
from common.broker.client import FastConnection, connect
from common.broker.committed import Committed, logged_messages, read
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import RECORD, unpack_ids, unpack_records
from deploy.launcher.embedded_broker import Broker
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Sealed
from tests.support import brokers
from tests.support.agents import CHANNEL, grants, hset, reports, start, step
from tests.support.broker.listening import listening
from tests.support.broker_state import KEYS, seal
from tests.support.brokers import Snapshot
from tests.support.tokenizer import ids as ids_of
from tests.support.waiting import PATIENCE_S, wait_for, wait_until


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
    assert not agent.state.rows


async def test_a_report_says_how_long_steps_of_each_kind_took(agent: Agent, redis: Redis) -> None:
    await start(agent)
    step(agent, prefill_tokens=64, duration_ms=20.0)
    step(agent, {1: (0, 5)}, prefilled=[(1, 2)], prefill_tokens=32, duration_ms=12.0)
    step(agent, {1: (1, 6)}, prefill_tokens=8, duration_ms=9.0)
    step(agent, {1: (2, 6)}, duration_ms=5.0)
    step(agent, {1: (3, 6)}, duration_ms=7.0)
    step(agent)
    agent.state.answer_takeover()
    await agent.flusher.flush()
    agent.state.answer_takeover()
    await agent.flusher.flush()
    first, second = await reports(redis)
    assert sorted(first.step_times) == [(1, 1, 8, 9.0), (2, 0, 96, 32.0), (2, 2, 0, 12.0)]
    assert first.step_times[0] == (2, 2, 0, 12.0), "what decode takes is known before what prefill adds"
    assert second.step_times == []


async def test_a_report_has_the_snapshots_of_flushes_without_one(agent: Agent, redis: Redis) -> None:
    await start(agent)
    for index, prefilled in enumerate([[], [(1, 2)]]):
        step(agent, {1: (index, index)}, snapshots=[3 + index], prefilled=prefilled)
        await agent.flusher.flush()
    assert [report.snapshots for report in await reports(redis)] == [[3, 4]]


async def test_a_sealed_agent_publishes_nothing(agent: Agent, redis: Redis) -> None:
    await start(agent)
    await seal(redis, "w0-1")
    step(agent, {1: (0, 5)}, ended=[(1, "length", 1)])
    with pytest.raises(Sealed):
        await agent.flusher.flush()
    with pytest.raises(Sealed):
        await agent.send_heartbeat()
    assert not await redis.hexists(KEYS.request("r1"), "terminal")  # type: ignore[misc]


async def test_the_log_has_what_is_published_and_tokens_that_nobody_reads(agent: Agent, redis: Redis) -> None:
    await start(agent, row=1)
    await start(agent, row=2)
    agent.state.rows[2].request = replace(agent.state.rows[2].request, channel="")
    step(agent, {1: (0, 5), 2: (0, 6)})
    flush = agent.flusher.build()
    assert flush is not None
    await agent.flusher.write(flush)
    [(_, fields)] = await redis.xrange(KEYS.log("w0-1"), min="1")
    logged = [decode(Events, message) for message in logged_messages(fields)]
    assert {(unpack_ids(one.all_tokens[0].ids)[0], one.sequence) for one in logged} == {(5, 1), (6, 0)}
    assert [message for _, message in flush.messages] == [*logged_messages(fields)]
    assert [*agent.flusher.channels.last] == [CHANNEL]


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
    flush = agent.flusher.build()
    assert flush is not None
    [(_, message)] = flush.messages
    return decode(Events, message)


async def run_steps(agent: Agent, begin: int, end: int) -> None:
    """Steps and flushes in which the row's token at each index is that index."""
    for index in range(begin, end):
        step(agent, {1: (index, index)})
        await agent.flusher.flush()


async def committed(redis: Redis, name: str = "r1") -> Committed:
    return (await read(PoolClient(redis, KEYS), [name]))[name]


async def ids(redis: Redis, name: str = "r1") -> list[int]:
    return unpack_records((await committed(redis, name)).records)[0]


async def lose_steps(agent: Agent, redis: Redis, first: int, end: int) -> None:
    """Start a row that steps up to `end`; the broker loses what came from `first` on."""
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, first)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, first, end)
    await snapshot.restore(redis)


async def test_tokens_of_lost_flushes_are_committed_again(agent: Agent, redis: Redis) -> None:
    await lose_steps(agent, redis, 60, 130)
    await run_steps(agent, 130, 131)
    assert await ids(redis) == list(range(131))
    await run_steps(agent, 131, 300)
    assert await ids(redis) == list(range(300))
    assert await redis.xlen(KEYS.log("w0-1")) <= 65


async def test_a_log_that_lost_flushes_is_kept_until_the_batcher_had_time_to_save_it(
    agent: Agent, redis: Redis
) -> None:
    """It may have tokens of a request whose end is lost."""
    await lose_steps(agent, redis, 50, 60)
    await run_steps(agent, 60, 120)
    assert await redis.xrange(KEYS.log("w0-1"), "50-0", "50-0")
    await run_steps(agent, 120, 130)
    assert await redis.xlen(KEYS.log("w0-1")) <= 65


async def test_the_batcher_is_told_that_reports_are_lost(agent: Agent, redis: Redis) -> None:
    await lose_steps(agent, redis, 0, 3)
    await run_steps(agent, 3, 5)
    assert [(report.sequence, report.reports_lost) for report in await reports(redis)] == [(4, True)]


async def test_a_row_that_ends_in_a_lost_flush_is_spilled_whole(agent: Agent, redis: Redis) -> None:
    await lose_steps(agent, redis, 70, 75)
    step(agent, {1: (75, 75)}, ended=[(1, "preempted", 76)], released=[(1, 77)])
    await agent.flusher.flush()
    assert unpack_records(await redis.get(KEYS.tokens("r1")))[0] == list(range(76))


async def test_the_broker_is_told_of_a_placement_that_it_lost(agent: Agent, redis: Redis) -> None:
    await hset(redis, KEYS.request("r1"), {"digest": "d", "worker": "w9", "attempt": 0, "base": 0})
    snapshot = await Snapshot.of(redis)
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, 3)
    await snapshot.restore(redis)
    await run_steps(agent, 3, 6)
    state = await committed(redis)
    assert (state.worker, state.attempt, state.num_tokens) == ("w0-1", 1, 6)


async def test_a_request_that_goes_on_elsewhere_is_dropped(agent: Agent, redis: Redis) -> None:
    for row in (1, 2):
        await start(agent, row=row, max_new_tokens=1000)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, 0, 3)
    await snapshot.restore(redis)
    await hset(redis, KEYS.request("r1"), {"worker": "w2", "attempt": 2, "base": 0})
    await run_steps(agent, 3, 4)
    assert grants(agent)[-1].stops == [(1, "preempted")]
    assert await redis.exists(KEYS.tokens("r1")) == 0
    step(agent, {1: (4, 4), 2: (0, 0)}, released=[(1, 5)])
    await agent.flusher.flush()
    *_, report = await reports(redis)
    assert (report.ended, report.released) == ([(1, "preempted", 4)], [(1, 5)])
    assert await ids(redis, "r2") == [0]


async def test_an_end_that_is_not_this_workers_to_say_is_not_said(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1)
    await hset(redis, KEYS.request("r1"), {"worker": "", "attempt": 2, "base": 0})
    step(agent, {1: (0, 5)}, ended=[(1, "length", 1)])
    await agent.flusher.flush()
    assert not (await committed(redis)).terminal
    assert not await redis.hexists(KEYS.request("r1"), "terminal")  # type: ignore[misc]


async def test_tokens_that_differ_from_the_committed_ones_are_dropped(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1000)
    shown = b"".join(RECORD.pack(token_id, -1.0) for token_id in (0, 1, 99))
    await redis.set(KEYS.tokens("r1"), shown)
    await run_steps(agent, 0, 64)
    assert await redis.get(KEYS.tokens("r1")) == shown
    assert grants(agent)[-1].stops == [(1, "preempted")]


async def test_a_string_that_was_deleted_is_written_again_with_the_next_flush(
    agent: Agent, redis: Redis
) -> None:
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, 70)
    await redis.delete(KEYS.tokens("r1"))
    await run_steps(agent, 70, 128)
    assert await ids(redis) == []
    await run_steps(agent, 128, 129)
    assert await ids(redis) == list(range(129))


# --- flush pace ---------------------------------------------------------------------------------------------

NUM_STEPS = 500


@pytest.fixture
async def redis(broker: Broker) -> AsyncIterator[Redis]:
    """A client by TCP, where answers can be held."""
    async with connect(brokers.open_port(broker.url), socket_connect_timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
async def flushing(agent: Agent) -> AsyncIterator[Agent]:
    """An agent whose task has published a row's first token, and rests."""
    task = asyncio.create_task(agent.flusher.run())
    await start(agent, max_new_tokens=1000)
    complete(agent, 0, prefilled=[(1, 2)])
    await wait_until(lambda: agent.flusher.rests and agent.flusher.sequence == 1)
    yield agent
    task.cancel()
    await asyncio.wait([task])


def complete(agent: Agent, index: int, **fields: object) -> None:
    """One step, whose token has its index as id."""
    step(agent, {1: (index, index)}, **fields)
    agent.flusher.flush_step()


async def has_ids(redis: Redis, count: int) -> None:
    """Returns when the broker has so many tokens."""
    await wait_for(lambda: ids(redis), list(range(count)))


async def test_a_step_is_sent_at_once_and_its_answer_waits_for_the_next(flushing: Agent) -> None:
    for index in range(1, 5):
        complete(flushing, index)
        assert flushing.state.outbox.is_empty, "it is on its way"
        await has_ids(flushing.pool.redis, index + 1)
        assert flushing.flusher.started is not None, "nobody was woken for the answer"
    flushing.flusher.poll()
    assert flushing.flusher.started is None


async def test_an_answer_that_is_late_is_taken_as_it_comes(flushing: Agent) -> None:
    redis = flushing.pool.redis
    await redis.client_pause(60_000, all=False)
    try:
        complete(flushing, 1)
        complete(flushing, 2)
        assert flushing.flusher.started is not None
        assert not flushing.state.outbox.is_empty, "a flush waits for the answer to the one before it"
    finally:
        await redis.client_unpause()
    await has_ids(redis, 3)
    await wait_until(lambda: flushing.flusher.rests)
    complete(flushing, 3)
    assert flushing.flusher.started is not None
    await has_ids(redis, 4)


async def test_the_last_step_leaves_nothing_to_be_answered(flushing: Agent) -> None:
    complete(flushing, 1)
    complete(flushing, 2, ended=[(1, "length", 3)], released=[(1, 4)])
    await asyncio.wait_for(flushing.state.idle.wait(), PATIENCE_S)
    assert flushing.flusher.started is None
    assert (await read(PoolClient(flushing.pool.redis, KEYS), ["r1"]))["r1"].terminal == "length"


async def test_a_flush_whose_connection_is_lost_is_written_again(flushing: Agent) -> None:
    redis = flushing.pool.redis
    complete(flushing, 1)
    await has_ids(redis, 2)
    await redis.client_kill_filter(_id=await connection_id(flushing))
    await wait_until(lambda: flushing.flusher.started is None)
    complete(flushing, 2)
    await has_ids(redis, 3)
    assert await redis.xlen(KEYS.log("w0-1")) == 4, "the entry that creates the stream, and three flushes"


async def connection_id(agent: Agent) -> str:
    """The broker's number of the connection for flushes: of those that ran a script last."""
    clients = await agent.pool.redis.client_list()
    connection = agent.flusher.client.connection
    assert connection is not None
    own = "{}:{}".format(*connection.transport.get_extra_info("sockname"))
    return str(next(client["id"] for client in clients if client["addr"] == own))


@pytest.mark.slow
async def test_no_answer_is_lost_whatever_is_late_and_in_whatever_parts_it_comes(
    flushing: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat comes here, which would look for one from time to time. Half of the calls are late."""
    draw = Random(1)

    def delay_s() -> float:
        return max(0.0, draw.uniform(-0.003, 0.003))

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(delay_s())
            result = function(*args)
            time.sleep(delay_s())
            return result

        return call

    for name in ("poll", "hold", "release", "send", "data_received"):
        monkeypatch.setattr(FastConnection, name, late(getattr(FastConnection, name)))
    redis = flushing.pool.redis
    for index in range(1, NUM_STEPS):
        monkeypatch.setattr(client, "RECEIVE_BYTES", draw.choice((1, 3, 2**16)))
        complete(flushing, index)
        await asyncio.sleep(delay_s())
        if draw.random() < 1 / 8:
            flushing.state.wake.set()
            await has_ids(redis, index + 1)
    flushing.state.wake.set()
    await has_ids(redis, NUM_STEPS)
