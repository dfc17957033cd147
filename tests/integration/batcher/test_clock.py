"""The batcher process and a broker whose clock jumps: no deadline moves, nothing that is live is lost."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.broker.client import connect
from common.broker.keys import Keys
from tests.support.broker.shifted_clock import JumpingBroker, jumping_broker
from tests.support.fleet.batchers import CHANNEL, admit, batcher, ended, waiting
from tests.support.waiting import wait_until

KEYS = Keys("default")
QUARTER_S = 900
DECADES_S = 56 * 365 * 86_400  # a machine that starts in 1970 and then asks for the time
CENTURY_MS = 100 * 365 * 86_400_000
"""Results of ended requests must outlive a jump, too: on a slow machine a request ends before it."""


@pytest.fixture
def jumping(tmp_path: Path) -> Iterator[JumpingBroker]:
    with jumping_broker(tmp_path) as broker:
        yield broker


@pytest.fixture
async def redis(jumping: JumpingBroker) -> AsyncIterator[Redis]:
    async with connect(jumping.url) as client:
        await client.set(KEYS.gateway("g"), 1)
        yield client


async def admit_two(redis: Redis, short_ms: int) -> None:
    """Admit a request with much time, and one with little. Returns when the batcher has, or has had, both."""
    await admit(redis, "long", ttl_ms=600_000)
    await admit(redis, "short", ttl_ms=short_ms, result_ttl_ms=CENTURY_MS)

    async def taken() -> bool:
        return await waiting(redis, 2) or bool(await redis.hexists(KEYS.request("short"), "terminal"))  # type: ignore[misc]

    await wait_until(taken)


async def two_rounds(redis: Redis) -> None:
    """Wait until the active batcher has done its housekeeping twice."""
    for _ in range(2):
        await redis.delete(KEYS.state)
        await wait_until(lambda: redis.exists(KEYS.state))


@pytest.mark.parametrize("jump_s", [DECADES_S, -QUARTER_S])
async def test_a_jump_of_the_broker_s_clock_moves_no_deadline(
    jumping: JumpingBroker, redis: Redis, jump_s: int
) -> None:
    with batcher(jumping.url):
        await wait_until(lambda: redis.exists(KEYS.state))
        await admit_two(redis, 1000)
        jumping.jump(jump_s)
        await two_rounds(redis)
        assert await redis.hget(KEYS.request("long"), "terminal") is None  # type: ignore[misc]
        assert await redis.hget(KEYS.request("long"), "channel") == CHANNEL.encode()  # type: ignore[misc]
        assert (await ended(redis, "short")).error_type == "timeout"
        await admit(redis, "next", ttl_ms=300)
        assert (await ended(redis, "next")).error_type == "timeout"
        await wait_until(lambda: waiting(redis, 1))


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [QUARTER_S, -QUARTER_S])
async def test_a_deadline_goes_on_at_a_takeover_with_the_time_that_was_left(
    jumping: JumpingBroker, redis: Redis, jump_s: int
) -> None:
    """After a jump back, the lease of the dead batcher would last for a quarter of an hour by the broker's
    clock.
    """
    with batcher(jumping.url, "b0"):
        await wait_until(lambda: redis.exists(KEYS.state))
        await admit_two(redis, 2500)
    jumping.jump(jump_s)
    await redis.delete(KEYS.state)
    with batcher(jumping.url, "b1"):
        assert (await ended(redis, "short")).error_type == "timeout"
        await wait_until(lambda: waiting(redis, 1))
