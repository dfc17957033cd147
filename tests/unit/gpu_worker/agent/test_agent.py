"""The agent as a whole, with a broker and an engine that only records."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from common.broker import worker_scripts
from gpu_worker.agent.agent import Agent
from tests.support.agents import start
from tests.support.waiting import PATIENCE_S, wait_until


async def test_step_timeout_is_twenty_times_the_expected_time_of_a_step(agent: Agent) -> None:
    assert agent.step_timeout_s() == agent.settings.step_timeout_s == 60
    await start(agent)
    agent.state.granted = replace(agent.state.granted, prefill_tokens=9999)
    assert agent.step_timeout_s() == 20 * 10_000 * 0.5 / 1000


async def test_the_watchdog_watches_while_rows_may_run(agent: Agent) -> None:
    assert not agent.is_busy()
    await start(agent)
    assert agent.is_busy()
    agent.state.step = agent.state.until
    assert not agent.is_busy()


async def test_a_worker_that_was_asked_to_drain_says_so_and_leaves(agent: Agent, redis: Redis) -> None:
    agent.state.idle.clear()  # as with a row: an idle one may leave before it has said so
    running = asyncio.create_task(agent.run())
    keys, name = agent.pool.keys, agent.worker.incarnation
    await wait_until(lambda: agent.pool.run(worker_scripts.drain(keys, name)))
    await wait_until(lambda: is_draining(redis, keys.worker(name)))
    assert not agent.state.signalled.is_set(), "its rows have all the time they need"
    agent.state.idle.set()
    assert await asyncio.wait_for(running, PATIENCE_S)


async def is_draining(redis: Redis, worker: str) -> bool:
    return bool(await redis.hget(worker, "state") == b"draining")  # type: ignore[misc]


async def test_run_returns_once_drained_and_idle(agent: Agent) -> None:
    agent.state.draining.set()
    await asyncio.wait_for(agent.run(), PATIENCE_S)


@pytest.mark.parametrize("ticks", range(12))
async def test_heartbeats_end_whenever_they_are_cancelled(agent: Agent, ticks: int) -> None:
    """Also in the moment in which they are asked to send one now: else a drained worker stays for ever."""
    await agent.create_streams()
    heartbeats = asyncio.create_task(agent.send_heartbeats())
    await wait_until(lambda: agent.pool.redis.exists(agent.pool.keys.worker(agent.worker.incarnation)))
    await asyncio.sleep(0)
    agent.heartbeat_now.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    heartbeats.cancel()
    done, _ = await asyncio.wait([heartbeats], timeout=PATIENCE_S)
    assert done and heartbeats.cancelled()
