"""Plans as grants, with a broker and an engine that only records. The stream of plans: every entry once, in
order, and a read that waits before it is asked for.
"""

import asyncio
import random
import threading

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from common.broker.committed import read
from common.broker.keys import parse_stream_id
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import HeldRow, Plan
from common.messages.records import RECORD, pack_ids
from common.metrics import catalogue
from gpu_worker.agent import grants as grants_module
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.grants import Entry, PlanStream, StreamId
from tests.support.agents import (
    KEYS,
    grants,
    plan,
    reports,
    start,
    step,
)
from tests.support.waiting import wait_until


async def test_every_grant_has_the_budgets_of_the_newest_plan(agent: Agent) -> None:
    await start(agent)
    agent.plans.apply(plan(agent, mixed_prefill_tokens=24, max_rows=8, may_exceed=True))
    agent.steps.stop(agent.state.table.rows[1], "stop_sequence")
    budgets = [(grant.mixed_prefill_tokens, grant.max_rows, grant.may_exceed) for grant in grants(agent)]
    assert budgets == [(0, 0, False), (24, 8, True), (24, 8, True)]


async def test_the_engine_learns_the_class_of_a_row(agent: Agent) -> None:
    for row, name in enumerate(("batch", "interactive", "standard")):
        await start(agent, row, class_name=name)
    assert [grant.starts[0].class_index for grant in grants(agent)] == [2, 0, 1]


async def test_unknown_rows_are_reported_preempted(agent: Agent, redis: Redis) -> None:
    agent.plans.apply(plan(agent, stops=[(9, "client")]))
    await agent.flusher.flush()
    (report,) = await reports(redis)
    assert (report.ended, report.released) == ([(9, "preempted", 0)], [(9, 0)])


async def test_an_unreadable_plan_is_counted_and_the_next_one_applied(agent: Agent, redis: Redis) -> None:
    before = catalogue.UNDECODABLE.values[()]
    await redis.xadd(KEYS.plans("w0-1"), {"plan": b"garbage"}, id="7-1")
    await redis.xadd(KEYS.plans("w0-1"), {"plan": encode(Plan(7, 2, 32, 64))}, id="7-2")
    following = asyncio.create_task(agent.plans.run())
    await wait_until(lambda: agent.state.plan.number == 2)
    following.cancel()
    assert catalogue.UNDECODABLE.values[()] == before + 1


async def test_a_worker_is_ready_once_a_batcher_has_taken_it_up(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it has loaded its model it can serve nobody yet."""
    ready = threading.Event()
    monkeypatch.setattr(grants_module, "READY", ready)
    running = asyncio.create_task(agent.run())
    await wait_until(lambda: redis.exists(KEYS.worker("w0-1")))
    assert not ready.is_set()
    await redis.xadd(KEYS.plans("w0-1"), {"plan": encode(Plan(7, 1, 0, 0, takeover=True))}, id="7-1")
    await wait_until(ready.is_set)
    agent.state.draining.set()
    await running


async def test_a_takeover_is_answered_with_all_rows_as_they_are_and_they_go_on(
    agent: Agent, redis: Redis
) -> None:
    """Tokens and ends that the same flush commits count."""
    first = RECORD.pack(9, -1.0)
    await start(agent, row=4)
    await start(agent, row=5, committed=first)
    await start(agent, row=6)
    step(agent, {4: (0, 11), 5: (1, 12)}, prefilled=[(4, 2), (5, 3)])
    agent.plans.apply(plan(agent, blocks=[(4, pack_ids([7, 8]))]))
    agent.plans.apply(plan(agent, stops=[(5, "client")]))
    num_grants = len(grants(agent))
    agent.plans.apply(Plan(8, 1, 0, 0, takeover=True))
    assert len(grants(agent)) == num_grants, "the engine is left alone"
    step(agent, {4: (1, 13)}, ended=[(5, "client", 2)])
    await agent.flusher.flush()
    (report,) = await reports(redis)
    assert (report.epoch, report.takeover, report.step, report.last_row) == (8, True, 2, 6)
    assert report.held == [
        HeldRow(4, "r4", 1, 0, 2, pack_ids([1, 7, 8]), 2, 1),
        HeldRow(5, "r5", 1, 1, 2, pack_ids([1]), 3, 1, ended=True),
        HeldRow(6, "r6", 1, 0, 0, pack_ids([1])),
    ]
    step(agent, {4: (2, 14)}, released=[(5, 4)])
    await agent.flusher.flush()
    later = (await reports(redis))[-1]
    assert (later.takeover, later.held, later.released) == (False, [], [(5, 4)])
    assert (await read(PoolClient(redis, KEYS), ["r4"]))["r4"].num_tokens == 3


async def test_the_agent_is_idle_when_it_holds_no_rows(agent: Agent) -> None:
    assert agent.state.idle.is_set()
    agent.plans.apply(plan(agent, blocks=[(5, pack_ids([3]))]))
    assert agent.state.idle.is_set(), "blocks for a row that has just ended"
    await start(agent)
    assert not agent.state.idle.is_set()


# --- the stream of plans -----------------------------------------------------------------------------------


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
