"""The agent as a whole, with a broker and an engine that only records."""

import asyncio

from gpu_worker.agent.agent import Agent
from tests.support.agents import start


async def test_step_timeout_is_twenty_times_the_expected_time_of_a_step(agent: Agent) -> None:
    assert agent.step_timeout_s() == agent.settings.step_timeout_s == 60
    await start(agent)
    agent.state.prefill_tokens = 9999
    assert agent.step_timeout_s() == 20 * 10_000 * 0.5 / 1000


async def test_the_watchdog_watches_while_rows_may_run(agent: Agent) -> None:
    assert not agent.is_busy()
    await start(agent)
    assert agent.is_busy()
    agent.state.step = agent.state.until
    assert not agent.is_busy()


async def test_run_returns_once_drained_and_idle(agent: Agent) -> None:
    agent.state.draining.set()
    await asyncio.wait_for(agent.run(), 5)
