"""Pictures on their way to the engine: a row gets the bytes of those that it must still compute."""

import pytest
from redis.asyncio import Redis

from common.messages.plan import NewRow, Plan
from common.messages.records import pack_ids
from common.messages.request import Generate, Picture, StoppingParams
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.grants import PlanHandler
from tests.support.agents import KEYS, grants, make_agent

FIRST, SECOND = Picture("aa", 2, 10), Picture("bb", 20, 4)


def new_row(row: int = 1, num_cached: int = 0, **fields: object) -> NewRow:
    request = Generate(
        f"r{row}",
        "d",
        pack_ids([5] * 40),
        StoppingParams(4),
        pictures=[FIRST, SECOND],
        **fields,  # type: ignore[arg-type]
    )
    return NewRow(row, 1, 0, b"", pack_ids([1, 2, 3]), request, num_cached)


async def start(agent: Agent, *rows: NewRow) -> list[NewRow]:
    plan = Plan(1, len(agent.state.rows), 8, 64, starts=[*rows])
    handler: PlanHandler = agent.plans
    plan = await handler.with_pictures(plan)
    before = len(grants(agent))
    handler.apply(plan)
    return [one for grant in grants(agent)[before:] for one in grant.starts]


async def keep(redis: Redis, **contents: bytes) -> None:
    for digest, content in contents.items():
        await redis.set(KEYS.picture(digest), content)


@pytest.mark.parametrize(
    ("num_cached", "needs_all", "digests"),
    [
        (0, False, ["aa", "bb"]),
        (11, False, ["aa", "bb"]),
        (12, False, ["bb"]),
        (24, False, []),
        (24, True, ["aa", "bb"]),  # positions after a picture depend on its size
    ],
)
async def test_a_row_gets_its_pictures_but_those_whose_kv_is_cached(
    redis: Redis, num_cached: int, needs_all: bool, digests: list[str]
) -> None:
    """A resume gets them again."""
    agent = await make_agent(redis)
    agent.plans.needs_all = needs_all
    await keep(redis, **{digest: digest.encode() for digest in digests})
    for number in (1, 2):
        [row] = await start(agent, new_row(number, num_cached=num_cached))
        assert [one.decode() for one in row.contents if one] == digests


async def test_a_row_whose_picture_is_lost_never_starts_and_its_request_fails(redis: Redis) -> None:
    """No other prompt may share blocks that were computed without the picture: it releases none with KV."""
    agent = await make_agent(redis)
    await keep(redis, aa=b"red")
    plain = NewRow(2, 1, 0, b"", b"", Generate("r2", "d", pack_ids([5]), StoppingParams(4)))
    [row] = await start(agent, new_row(), plain)
    assert row.row == 2
    outbox = agent.state.outbox
    assert [(row.request.request_id, why) for row, why in outbox.terminals] == [("r1", "picture_gone")]
    assert (outbox.report.ended, outbox.report.released) == ([(1, "picture_gone", 0)], [(1, 0)])
    assert [*agent.state.rows] == [2]
