"""Plans as grants, with a broker and an engine that only records."""

import asyncio

from redis.asyncio import Redis

from common.messages.codec import encode
from common.messages.packing import pack_ids
from common.messages.plan import Plan
from common.metrics import catalogue
from gpu_worker.agent.agent import Agent
from tests.support.agents import (
    KEYS,
    grants,
    plan,
    reports,
    start,
    step,
)
from tests.support.waiting import wait_until


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
    await wait_until(lambda: agent.state.plan == 2)
    following.cancel()
    assert catalogue.UNDECODABLE.values[()] == before + 1


async def test_a_takeover_stops_all_rows_and_is_reported_when_they_are_released(
    agent: Agent, redis: Redis
) -> None:
    await start(agent)
    agent.plans.apply(Plan(8, 1, 0, 0, takeover=True))
    assert grants(agent)[-1].stops == [(1, "takeover")]
    step(agent, ended=[(1, "takeover", 0)])
    await agent.flusher.flush()
    step(agent, released=[(1, 2)])
    await agent.flusher.flush()
    assert [(report.epoch, report.takeover) for report in await reports(redis)] == [(8, False), (8, True)]
    assert await redis.exists(KEYS.result("r1")) == 0


async def test_the_agent_is_idle_when_it_holds_no_rows(agent: Agent) -> None:
    assert agent.state.idle.is_set()
    agent.plans.apply(plan(agent, blocks=[(5, pack_ids([3]))]))
    assert agent.state.idle.is_set(), "blocks for a row that has just ended"
    await start(agent)
    assert not agent.state.idle.is_set()
