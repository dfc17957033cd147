"""What the agent writes to the broker: one flush commits, logs, reports and publishes; what a broker has lost
is written again.
"""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.broker.committed import Committed, logged_messages, read
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import RECORD, unpack_ids, unpack_records
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Sealed
from gpu_worker.agent.state import Outbox
from tests.support.agents import CHANNEL, KEYS, grants, hset, reports, start, step
from tests.support.broker.listening import listening
from tests.support.broker.rollback import Snapshot
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


async def test_tokens_after_the_first_are_in_columns(agent: Agent) -> None:
    await start(agent, row=1)
    step(agent, {1: (0, 5)})
    assert has_columns(agent) is False, "first tokens never are"
    step(agent, {1: (1, 6)})
    assert has_columns(agent)


def has_columns(agent: Agent) -> bool:
    outbox, agent.state.outbox = agent.state.outbox, Outbox()
    [(_, message)] = agent.publisher.build(outbox, None, 0, []).messages
    return decode(Events, message).columns is not None


async def run_steps(agent: Agent, begin: int, end: int, row: int = 1) -> None:
    """Steps and flushes in which the row's token at each index is that index."""
    for index in range(begin, end):
        step(agent, {row: (index, index)})
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
