"""A broker that lost the last flushes, or a row's string: the agent offers its rows anew."""

from redis.asyncio import Redis

from common.broker.committed import Committed, read
from common.broker.pool_client import PoolClient
from common.messages.records import RECORD, unpack_records
from gpu_worker.agent.agent import Agent
from tests.support.agents import KEYS, grants, hset, reports, start, step
from tests.support.broker.rollback import Snapshot


async def run_steps(agent: Agent, begin: int, end: int, row: int = 1) -> None:
    """Steps and flushes in which the row's token at each index is that index."""
    for index in range(begin, end):
        step(agent, {row: (index, index)})
        await agent.flusher.flush()


async def committed(redis: Redis, name: str = "r1") -> Committed:
    return (await read(PoolClient(redis, KEYS), [name]))[name]


async def ids(redis: Redis, name: str = "r1") -> list[int]:
    return unpack_records((await committed(redis, name)).records)[0]


async def test_tokens_of_lost_flushes_are_committed_again(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, 60)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, 60, 130)
    await snapshot.restore(redis)
    await run_steps(agent, 130, 131)
    assert await ids(redis) == list(range(131))
    await run_steps(agent, 131, 300)
    assert await ids(redis) == list(range(300))
    assert await redis.xlen(KEYS.log("w0-1")) <= 65


async def test_a_log_that_lost_flushes_is_kept_until_the_batcher_had_time_to_save_it(
    agent: Agent, redis: Redis
) -> None:
    """It may have tokens of a request whose end is lost."""
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, 50)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, 50, 60)
    await snapshot.restore(redis)
    await run_steps(agent, 60, 120)
    assert await redis.xrange(KEYS.log("w0-1"), "50-0", "50-0")
    await run_steps(agent, 120, 130)
    assert await redis.xlen(KEYS.log("w0-1")) <= 65


async def test_the_batcher_is_told_that_reports_are_lost(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1000)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, 0, 3)
    await snapshot.restore(redis)
    await run_steps(agent, 3, 5)
    assert [(report.sequence, report.reports_lost) for report in await reports(redis)] == [(4, True)]


async def test_a_row_that_ends_in_a_lost_flush_is_spilled_whole(agent: Agent, redis: Redis) -> None:
    await start(agent, max_new_tokens=1000)
    await run_steps(agent, 0, 70)
    snapshot = await Snapshot.of(redis)
    await run_steps(agent, 70, 75)
    await snapshot.restore(redis)
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
