"""The report clock: a report is due once at a plan's step; the time from there to the next grant is measured.
The outbox: when a flush has something to publish, and when the batcher must get a report.
"""

from typing import Any

import pytest
from redis.asyncio import Redis

from common.messages.plan import Plan
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.state import Outbox, ReportClock
from tests.support.agents import make_agent, plan, reports, start, step


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr("gpu_worker.agent.state.time.monotonic", lambda: now_s[0])
    return now_s


def run_to(clock: ReportClock, step: int, now_s: list[float]) -> None:
    clock.on_step(step)
    now_s[0] += 0.002


def test_a_round_trip_begins_at_the_step_at_which_a_report_is_due(now_s: list[float]) -> None:
    clock = ReportClock()
    clock.on_grant(16)
    for number in range(1, 20):
        run_to(clock, number, now_s)
    assert clock.is_due(19)
    assert clock.on_report(19) == [] and not clock.is_due(20)
    clock.on_grant(16)  # a plan that was on its way, without a grant
    assert clock.on_report(20) == [] and not clock.is_due(21)
    clock.on_grant(35)
    assert clock.on_report(21) == [pytest.approx(8.0)], "from step 16 on"
    assert clock.on_report(22) == [], "once"
    clock.on_grant(60)
    assert clock.on_report(23) == [], "nobody had waited for this one"


def test_no_report_is_due_at_a_step_that_another_report_has_told(now_s: list[float]) -> None:
    clock = ReportClock()
    clock.on_report(20)
    clock.on_grant(16)
    run_to(clock, 21, now_s)
    assert not clock.is_due(21)


def test_a_round_trip_of_a_batcher_that_is_gone_does_not_count(now_s: list[float]) -> None:
    clock = ReportClock()
    clock.on_grant(16)
    run_to(clock, 16, now_s)
    clock.stop_waiting()
    clock.on_grant(40)
    assert clock.on_report(17) == []


async def run_steps(agent: Agent, count: int) -> None:
    """Each with a flush."""
    for _ in range(count):
        step(agent)
        await agent.flusher.flush()


async def test_a_report_is_due_where_the_plan_says(agent: Agent, redis: Redis) -> None:
    await start(agent)
    agent.plans.apply(plan(agent, report_at=3))
    await run_steps(agent, 5)
    agent.plans.apply(plan(agent, report_at=9))
    await run_steps(agent, 5)
    first, second = await reports(redis)
    assert (first.step, first.round_trips) == (3, [])
    assert second.step == 9 and len(second.round_trips) == 1


async def test_a_batcher_of_an_earlier_version_hears_when_half_of_the_steps_are_made(
    agent: Agent, redis: Redis
) -> None:
    await start(agent)
    agent.plans.apply(Plan(7, 9, until=40, prefill_tokens=64))
    await run_steps(agent, 24)
    assert [report.step for report in await reports(redis)] == [20]


async def test_a_grant_is_not_waited_for_while_no_row_is_held(agent: Agent, redis: Redis) -> None:
    """The batcher grants nothing then, however long that is."""
    await start(agent)
    agent.plans.apply(plan(agent, report_at=3))
    await run_steps(agent, 4)
    step(agent, ended=[(1, "length", 4)], released=[(1, 5)])
    await start(agent, row=2)
    agent.plans.apply(plan(agent, report_at=9))
    await run_steps(agent, 4)
    assert [report.round_trips for report in await reports(redis)] == [[], [], []]


async def test_a_report_is_sent_where_a_plan_says_that_it_was_due_at_a_step_that_is_made(
    agent: Agent, redis: Redis
) -> None:
    """An engine that has made all its steps wakes nobody: a batcher that took over grants fewer than the one
    before it, and the engine has made them when its plan comes.
    """
    await start(agent)
    agent.plans.apply(plan(agent, report_at=16))
    await run_steps(agent, 20)
    agent.state.wake.clear()
    agent.plans.apply(plan(agent, report_at=16))
    assert not agent.state.wake.is_set(), "a report has told of that step"
    agent.plans.apply(plan(agent, report_at=18))
    assert agent.state.wake.is_set()
    await agent.flusher.flush()
    assert [report.step for report in await reports(redis)] == [16, 20]


# --- outbox ----------------------------------------------------------------------------------------------


def test_a_new_outbox_is_empty() -> None:
    assert Outbox().is_empty and not Outbox().needs_report


@pytest.mark.parametrize(
    "fields",
    [
        {"prefilled": [(1, 4, 1)]},
        {"ended": [(1, "length", 2)]},
        {"released": [(1, 3)]},
        {"takeover": True},
    ],
)
def test_prefills_ends_releases_and_takeover_need_a_report(fields: dict[str, Any]) -> None:
    outbox = Outbox(**fields)
    assert outbox.needs_report and not outbox.is_empty


async def test_new_tokens_are_published_without_a_report(redis: Redis) -> None:
    agent = await make_agent(redis)
    await start(agent)
    outbox = Outbox(rows=agent.state.table.live)
    assert not outbox.is_empty and not outbox.needs_report
