"""Flush pace: few rows in short steps share a flush between two steps; nothing else waits."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from common.broker.committed import logged_messages
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.flush import FEW_ROWS, MAX_STEPS_OF_FLUSH, MAX_WAIT_S, may_wait
from gpu_worker.agent.state import Outbox
from tests.support.agents import KEYS, start, step
from tests.support.waiting import wait_until

SHORT_MS = 2.0


@pytest.fixture
async def flushing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    """An agent that flushes by itself and waits for a step without end, with a row that has its first
    token.
    """
    monkeypatch.setattr("gpu_worker.agent.flush.MAX_WAIT_S", 3600.0)
    task = asyncio.create_task(agent.flusher.run())
    await start(agent)
    complete(agent, 0, prefilled=[(1, 2)])
    await logged(agent.pool.redis, [[0]])
    yield agent
    task.cancel()
    await asyncio.wait([task])


def complete(agent: Agent, index: int, **fields: object) -> None:
    """One step, whose token has its index as id."""
    step(agent, {1: (index, index)}, **({"duration_ms": SHORT_MS} | fields))
    agent.state.wake.set()


async def logged(redis: Redis, ids: list[list[int]]) -> None:
    """Returns when the log has these ids, flush by flush."""

    async def flushes() -> list[list[int]]:
        entries = [
            decode(Events, message)
            for _, fields in await redis.xrange(KEYS.log("w0-1"))
            for message in logged_messages(fields)
        ]
        return [[one for tokens in entry.all_tokens for one in unpack_ids(tokens.ids)] for entry in entries]

    async def has_ids() -> bool:
        return await flushes() == ids

    await wait_until(has_ids)


async def test_the_tokens_of_two_short_steps_share_a_flush(flushing: Agent) -> None:
    for index in (1, 3):
        complete(flushing, index)
        await wait_until(lambda: not flushing.state.wake.is_set())
        assert flushing.state.outbox.num_steps == 1, "it waits"
        complete(flushing, index + 1)
        await logged(flushing.pool.redis, [[0], [1, 2], [3, 4]][: 1 + (index + 1) // 2])


async def test_no_token_waits_when_no_step_is_to_come_soon(flushing: Agent) -> None:
    complete(flushing, 1, duration_ms=1000 * MAX_WAIT_S + 1)
    await logged(flushing.pool.redis, [[0], [1]])
    flushing.state.until = flushing.state.step + 1
    complete(flushing, 2)
    await logged(flushing.pool.redis, [[0], [1], [2]])


async def test_an_end_does_not_wait(flushing: Agent) -> None:
    complete(flushing, 1)
    await wait_until(lambda: not flushing.state.wake.is_set())
    complete(flushing, 2, ended=[(1, "length", 3)], released=[(1, 4)])
    await logged(flushing.pool.redis, [[0], [1, 2]])
    await start(flushing, row=2)
    step(flushing, {2: (0, 9)}, duration_ms=SHORT_MS, prefilled=[(2, 2)], ended=[(2, "length", 1)])
    flushing.state.wake.set()
    await logged(flushing.pool.redis, [[0], [1, 2], [9]])


async def test_a_step_that_does_not_come_is_not_waited_for_long(
    flushing: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.agent.flush.MAX_WAIT_S", MAX_WAIT_S)
    complete(flushing, 1)
    await logged(flushing.pool.redis, [[0], [1]])


@pytest.mark.parametrize(
    ("outbox", "num_rows", "step_ms", "waits"),
    [
        (Outbox(num_steps=1), 1, SHORT_MS, True),
        (Outbox(num_steps=1), FEW_ROWS, 1000 * MAX_WAIT_S, True),
        (Outbox(num_steps=1), FEW_ROWS + 1, SHORT_MS, False),
        (Outbox(num_steps=1), 1, 0.0, False),
        (Outbox(num_steps=1), 1, 1000 * MAX_WAIT_S + 1, False),
        (Outbox(num_steps=MAX_STEPS_OF_FLUSH), 1, SHORT_MS, False),
        (Outbox(), 1, SHORT_MS, False),
        (Outbox(num_steps=1, prefilled=[(1, 2, 1)]), 1, SHORT_MS, False),
        (Outbox(num_steps=1, ended=[(1, "length", 2)]), 1, SHORT_MS, False),
        (Outbox(num_steps=1, takeover=True), 1, SHORT_MS, False),
    ],
)
def test_what_may_wait(outbox: Outbox, num_rows: int, step_ms: float, waits: bool) -> None:
    assert may_wait(outbox, num_rows, step_ms) == waits
