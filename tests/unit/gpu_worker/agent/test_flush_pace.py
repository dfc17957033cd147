"""When steps are flushed: in the call that brings a step, whose answer is taken with the next one; tokens of
few rows in short steps share a flush.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker import client
from common.broker.client import FastConnection, connect
from common.broker.committed import logged_messages, read
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids, unpack_records
from deploy.launcher.embedded_broker import Broker
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import MAX_WAIT_S, Sealed
from tests.support import brokers
from tests.support.agents import KEYS, start, step
from tests.support.broker_state import seal
from tests.support.waiting import PATIENCE_S, wait_for, wait_until

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
    await wait_until(lambda: agent.flusher.rests and agent.publisher.sequence == 1)
    yield agent
    task.cancel()
    await asyncio.wait([task])


def complete(agent: Agent, index: int, **fields: object) -> None:
    """One step, whose token has its index as id."""
    step(agent, {1: (index, index)}, **fields)
    agent.flusher.flush_step()


async def ids(redis: Redis) -> list[int]:
    return unpack_records((await read(PoolClient(redis, KEYS), ["r1"]))["r1"].records)[0]


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
    connection = agent.publisher.client.connection
    assert connection is not None
    own = "{}:{}".format(*connection.transport.get_extra_info("sockname"))
    return str(next(client["id"] for client in clients if client["addr"] == own))


async def test_a_sealed_agent_ends_with_the_next_step(agent: Agent) -> None:
    running = asyncio.create_task(agent.flusher.run())
    await start(agent, max_new_tokens=1000)
    complete(agent, 0, prefilled=[(1, 2)])
    await wait_until(lambda: agent.flusher.rests and agent.publisher.sequence == 1)
    await seal(agent.pool.redis, "w0-1")
    complete(agent, 1)
    assert agent.flusher.started is not None
    complete(agent, 2)
    with pytest.raises(Sealed):
        await asyncio.wait_for(running, PATIENCE_S)


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


SHORT_MS = 2.0


@pytest.fixture
async def pacing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    """An agent that flushes by itself and waits for a step without end, with a row that has its first
    token.
    """
    monkeypatch.setattr("gpu_worker.agent.publish.MAX_WAIT_S", 3600.0)
    task = asyncio.create_task(agent.flusher.run())
    await start(agent)
    complete_short(agent, 0, prefilled=[(1, 2)])
    await logged(agent.pool.redis, [[0]])
    yield agent
    task.cancel()
    await asyncio.wait([task])


def complete_short(agent: Agent, index: int, **fields: object) -> None:
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

    await wait_for(flushes, ids)


async def test_the_tokens_of_two_short_steps_share_a_flush(pacing: Agent) -> None:
    for index in (1, 3):
        complete_short(pacing, index)
        await wait_until(lambda: not pacing.state.wake.is_set())
        assert pacing.state.outbox.num_steps == 1, "it waits"
        complete_short(pacing, index + 1)
        await logged(pacing.pool.redis, [[0], [1, 2], [3, 4]][: 1 + (index + 1) // 2])


async def test_a_step_that_does_not_come_is_not_waited_for_long(
    pacing: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.agent.publish.MAX_WAIT_S", MAX_WAIT_S)
    complete_short(pacing, 1)
    await logged(pacing.pool.redis, [[0], [1]])
