"""Pictures on their way to the engine: a row gets the bytes of those that it must still compute."""

from typing import Any

import pytest
from redis.asyncio import Redis

from common.messages.records import pack_ids
from common.messages.request import Picture
from gpu_worker.agent.agent import Agent
from tests.support.agents import KEYS, grants, start

TWO: dict[str, Any] = {
    "prompt_ids": pack_ids([5] * 40),
    "pictures": [Picture("aa", 2, 10), Picture("bb", 20, 4)],
}


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
    agent: Agent, redis: Redis, num_cached: int, needs_all: bool, digests: list[str]
) -> None:
    """A resume gets them again."""
    agent.plans.needs_all = needs_all
    await keep(redis, **{digest: digest.encode() for digest in digests})
    for number in (1, 2):
        await start(agent, number, num_cached=num_cached, **TWO)
        [row] = grants(agent)[-1].starts
        assert [one.decode() for one in row.contents if one] == digests


async def test_a_row_whose_picture_is_lost_never_starts_and_its_request_fails(
    agent: Agent, redis: Redis
) -> None:
    """No other prompt may share blocks that were computed without the picture: it releases none with KV."""
    await keep(redis, aa=b"red")
    await start(agent, **TWO)
    assert grants(agent)[-1].starts == []
    outbox = agent.state.outbox
    assert [(row.request.request_id, why) for row, why in outbox.terminals] == [("r1", "picture_gone")]
    assert (outbox.report.ended, outbox.report.released) == ([(1, "picture_gone", 0)], [(1, 0)])
    await start(agent, 2)
    assert [*agent.state.rows] == [2]
