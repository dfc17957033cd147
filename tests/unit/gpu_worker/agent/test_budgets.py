"""Rows of an API key that reaches its budget: they end, and no token beyond it is published."""

import time

from redis.asyncio import Redis

from api.requests.usage import month_begin, month_name
from common.broker.keys import Keys
from common.messages.records import unpack_records
from common.messages.request import UsageAccount
from gpu_worker.agent.agent import Agent
from tests.support.agents import KEYS, grants, hset, reports, start, step


async def start_rows(agent: Agent, budget: int, *rows: int) -> None:
    """Start rows with prompts of two tokens; their one API key has this budget."""
    account = UsageAccount("m", budget_tokens=budget)
    for row in rows:
        await start(agent, row, account=account, key_id="k", max_new_tokens=100)
        request = agent.state.table.rows[row].request
        await hset(agent.pool.redis, KEYS.request(f"r{row}"), {"account": request.account_text})


async def publish_step(agent: Agent, index: int, *rows: int) -> None:
    step(agent, dict.fromkeys(rows, (index, 5 + index)))
    await agent.flusher.flush()


async def ends(redis: Redis, *rows: int) -> list[tuple[bytes | None, bytes | None, int]]:
    """Reason, number of tokens, and tokens kept, of each request."""
    return [
        (
            *(await redis.hmget(KEYS.request(f"r{row}"), ["terminal", "num_tokens"])),  # type: ignore[misc]
            len(unpack_records(await redis.get(KEYS.tokens(f"r{row}")) or b"")[0]),
        )
        for row in rows
    ]


async def spent(redis: Redis) -> int:
    month = month_name(month_begin(time.time()))
    return int(await redis.hget(Keys.usage_spent(month), "k tokens") or 0)  # type: ignore[misc]


async def test_a_row_ends_at_the_budget_with_what_it_has(agent: Agent, redis: Redis) -> None:
    """The prompt and three tokens are the budget. The token of the next step is dropped."""
    await start_rows(agent, 5, 1)
    for index in range(4):
        await publish_step(agent, index, 1)
    assert await ends(redis, 1) == [(b"budget", b"3", 3)]
    assert await spent(redis) == 5
    assert grants(agent)[-1].stops == [(1, "budget")]
    assert [report.ended for report in await reports(redis)][-1] == [(1, "budget", 3)]
    assert not agent.state.budgets.num_rows


async def test_all_rows_of_a_key_share_what_is_left(agent: Agent, redis: Redis) -> None:
    """Two prompts and two first tokens are 6. Of three more, the first row gets two."""
    await start_rows(agent, 9, 1, 2)
    for index in range(4):
        await publish_step(agent, index, 1, 2)
    assert await spent(redis) == 9
    assert await ends(redis, 1, 2) == [(b"budget", b"3", 3), (b"budget", b"2", 2)]


async def test_steps_that_wait_for_a_slow_broker_are_not_published_beyond_the_budget(
    agent: Agent, redis: Redis
) -> None:
    await start_rows(agent, 6, 1)
    await publish_step(agent, 0, 1)
    for index in range(1, 20):
        step(agent, {1: (index, 5)})
    await agent.flusher.flush()
    assert await ends(redis, 1) == [(b"budget", b"4", 4)]
    assert await spent(redis) == 6


async def test_a_row_that_ends_beyond_the_budget_ends_at_it(agent: Agent, redis: Redis) -> None:
    await start_rows(agent, 4, 1)
    await publish_step(agent, 0, 1)
    step(agent, {1: (1, 6)})
    step(agent, {1: (2, 7)}, ended=[(1, "eos_token", 3)])
    await agent.flusher.flush()
    assert await ends(redis, 1) == [(b"budget", b"2", 2)]
    assert [report.ended for report in await reports(redis)][-1] == [(1, "budget", 2)]


async def test_the_first_token_was_set_aside_at_admission(agent: Agent, redis: Redis) -> None:
    """A request that was admitted in time gets it, although others have used the budget since."""
    await start_rows(agent, 5, 1, 2)
    for index in range(3):
        await publish_step(agent, index, 1)
    await publish_step(agent, 0, 2)
    await publish_step(agent, 1, 2)
    assert await ends(redis, 2) == [(b"budget", b"1", 1)]


async def test_rows_of_keys_without_a_budget_go_on(agent: Agent, redis: Redis) -> None:
    await start_rows(agent, 3, 1)
    await start(agent, 2, key_id="k", max_new_tokens=100)
    for index in range(3):
        await publish_step(agent, index, 1, 2)
    assert await ends(redis, 1, 2) == [(b"budget", b"1", 1), (None, None, 0)]
    assert agent.state.table.rows[2].num_tokens == 3
