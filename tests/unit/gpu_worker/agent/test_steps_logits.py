"""Logits on their way through the agent: written before the tokens that they belong to, by one attempt."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from common.broker.committed import read, read_logits
from common.broker.pool_client import PoolClient
from common.messages.logits import LogitsParams
from common.messages.records import RECORD, pack_ids
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.publish import Publisher
from tests.support.agents import KEYS, grants, make_agent, start, step

LOGITS = LogitsParams(True, True, "float32", 2)


@pytest.fixture
async def agent(redis: Redis) -> Agent:
    return await make_agent(redis)


def rows(first: int, count: int) -> tuple[int, int, bytes]:
    """Logits of row 1 at some positions: each has its own byte."""
    return (
        1,
        first,
        b"".join(bytes([position]) * LOGITS.row_bytes for position in range(first, first + count)),
    )


async def written(redis: Redis, num_rows: int) -> list[int] | None:
    found = await read_logits(PoolClient(redis, KEYS), "r1", num_rows * LOGITS.row_bytes)
    return None if found is None else list(found[:: LOGITS.row_bytes])


async def test_logits_are_written_before_their_tokens(agent: Agent, redis: Redis) -> None:
    """Those of a prompt's first chunks, too, which bring no token; those after the end are dropped."""
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4, 5]), max_new_tokens=2)
    assert grants(agent)[-1].starts[0].logits == (0, 4, "float32")
    step(agent, logits=[rows(0, 2)])
    assert not agent.state.outbox.is_empty and not agent.flusher.can_start
    await agent.flusher.flush()
    assert await written(redis, 2) == [0, 1] and await written(redis, 3) is None
    step(agent, {1: (0, 9)}, logits=[rows(2, 1)], prefilled=[(1, 3)])
    step(agent, {1: (1, 8)}, logits=[rows(3, 1)], ended=[(1, "length", 2)], released=[(1, 4)])
    step(agent, logits=[rows(4, 1)])
    await agent.flusher.flush()
    assert await written(redis, 4) == [0, 1, 2, 3] and await written(redis, 5) is None
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].terminal == "length"


async def test_logits_of_the_generation_alone_begin_at_the_last_token_of_the_prompt(
    agent: Agent, redis: Redis
) -> None:
    logits = LogitsParams(False, True, "bfloat16", 4)
    await start(agent, logits=logits, prompt_ids=pack_ids([3, 4, 5]), committed=RECORD.pack(7, -1.0))
    assert grants(agent)[-1].starts[0].logits == (2, 12, "bfloat16")
    step(agent, {1: (1, 9)}, logits=[rows(2, 2)], prefilled=[(1, 4)])
    await agent.flusher.flush()
    assert await written(redis, 2) == [2, 3]


async def test_pieces_are_written_once_although_a_call_fails(
    agent: Agent, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, write = [0, 1, 1, 0, 0, 0], Publisher.write_logits

    async def failing(self: Publisher, piece: object) -> int:
        reply = await write(self, piece)  # type: ignore[arg-type]
        if failures.pop(0):
            raise ConnectionError("the answer is lost")
        return reply

    monkeypatch.setattr(Publisher, "write_logits", failing)
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    step(agent, {1: (0, 9)}, logits=[rows(0, 1), rows(1, 1)], prefilled=[(1, 2)])
    step(agent, {1: (1, 9)}, logits=[rows(2, 1)])
    await agent.flusher.flush()
    assert await written(redis, 3) == [0, 1, 2] and await redis.llen(KEYS.logits("r1")) == 3  # type: ignore[misc]
    assert (await read(PoolClient(redis, KEYS), ["r1"]))["r1"].num_tokens == 2


async def test_a_row_whose_logits_are_lost_is_preempted(agent: Agent, redis: Redis) -> None:
    """Its tokens stay, and its next attempt computes all logits."""
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    step(agent, {1: (0, 9)}, logits=[rows(0, 2)], prefilled=[(1, 2)])
    await agent.flusher.flush()
    await redis.delete(KEYS.logits("r1"))
    step(agent, {1: (1, 8)}, logits=[rows(2, 1)])
    await agent.flusher.flush()
    assert grants(agent)[-1].stops == [(1, "preempted")]
    assert agent.state.outbox.ended == [(1, "preempted", 2)]
    await agent.flusher.flush()
    assert len(await redis.get(KEYS.tokens("r1"))) == 2 * RECORD.size


async def test_a_row_of_another_worker_is_dropped(agent: Agent, redis: Redis) -> None:
    await start(agent, logits=LOGITS, prompt_ids=pack_ids([3, 4]))
    await redis.hset(KEYS.request("r1"), mapping={"worker": "w1-1", "attempt": 2})  # type: ignore[misc]
    step(agent, logits=[rows(0, 1)])
    await agent.flusher.flush()
    assert grants(agent)[-1].stops == [(1, "preempted")] and not await redis.exists(KEYS.logits("r1"))


async def test_rows_without_logits_write_none(agent: Agent, redis: Redis) -> None:
    await start(agent)
    assert grants(agent)[-1].starts[0].logits is None
    step(agent, {1: (0, 9)}, prefilled=[(1, 2)])
    assert not agent.state.outbox.logits
