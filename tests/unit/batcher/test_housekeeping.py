"""OrphanTracker: requests end when their gateway has been absent for their grace, and not before."""

import time
from dataclasses import replace

from redis.asyncio import Redis

from batcher.housekeeping import OrphanTracker
from batcher.scheduling.sequence import Sequence
from common.broker.pool_client import PoolClient
from tests.support.broker_state import KEYS, make_request


def sequence(request_id: str, gateway: str, grace_ms: int) -> Sequence:
    request = replace(make_request(request_id), gateway=gateway, grace_ms=grace_ms)
    return Sequence(request, "1-0", 10**15)


async def find(tracker: OrphanTracker, sequences: list[Sequence]) -> list[str]:
    live = {sequence.request_id: sequence for sequence in sequences}
    return await tracker.orphans(live, {sequence.request.gateway for sequence in sequences})


async def test_requests_of_an_absent_gateway_are_orphans_after_their_grace(redis: Redis) -> None:
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [
        sequence("short", "g0", 0),
        sequence("long", "g0", 60_000),
        sequence("other", "g1", 0),
        sequence("job", "", 0),
    ]
    await redis.set(KEYS.gateway("g1"), 1)
    assert await find(tracker, sequences) == ["short"]
    tracker.absent_since_s["g0"] = time.monotonic() - 60
    assert await find(tracker, sequences) == ["short", "long"]


async def test_a_request_whose_client_came_back_has_another_gateway(redis: Redis) -> None:
    """Redis says so; that gateway's own death gives it its grace anew."""
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [sequence("r1", "g0", 30_000), sequence("r2", "g0", 30_000)]
    await redis.hset(KEYS.request("r1"), "gateway", "g1")  # type: ignore[misc]
    await redis.hset(KEYS.request("r2"), "gateway", "g0")  # type: ignore[misc]
    await redis.set(KEYS.gateway("g1"), 1)
    assert await find(tracker, sequences) == []
    tracker.absent_since_s["g0"] -= 60
    assert await find(tracker, sequences) == ["r2"]
    await redis.delete(KEYS.gateway("g1"))
    assert await find(tracker, sequences[:1]) == []
    tracker.absent_since_s["g1"] -= 60
    assert await find(tracker, sequences[:1]) == ["r1"]


async def test_a_gateway_that_returns_has_its_whole_grace_again(redis: Redis) -> None:
    tracker = OrphanTracker(PoolClient(redis, KEYS))
    sequences = [sequence("r1", "g0", 600_000)]
    await find(tracker, sequences)
    tracker.absent_since_s["g0"] -= 400
    await redis.set(KEYS.gateway("g0"), 1)
    assert await find(tracker, sequences) == []
    await redis.delete(KEYS.gateway("g0"))
    await find(tracker, sequences)
    tracker.absent_since_s["g0"] -= 400
    assert await find(tracker, sequences) == []
