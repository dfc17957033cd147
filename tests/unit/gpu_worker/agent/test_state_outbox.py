"""The outbox: when a flush has something to publish, and when the batcher must get a report."""

from typing import Any

import pytest
from redis.asyncio import Redis

from gpu_worker.agent.state import Outbox
from tests.support.agents import make_agent, start


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
