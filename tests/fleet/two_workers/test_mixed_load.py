"""All kinds of requests at once: each answer is right, and no key, task, handle or memory is left over."""

from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.admission import MAX_COMMANDS
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.leftovers import KEPT, handles, idle, memory, settled_tasks, subscriptions, tasks
from tests.support.fleet.random_clients import random_clients
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MIB = 2**20
MOST_GROWTH = {"tokenfleet engine": 96 * MIB, "tokenfleet": 12 * MIB}
"""Most growth of a process after its first requests. Tensors of new sizes fragment the engine's memory for
some thousand requests.
"""


def grown(fleet: Fleet, before: dict[str, int]) -> dict[str, int]:
    """Return what has grown too much, and by how many bytes."""
    growth = {name: size - before[name] for name, size in memory(fleet).items() if name in before}
    return {
        name: more
        for name, more in growth.items()
        if more > next(most for kind, most in MOST_GROWTH.items() if name.startswith(kind))
    }


async def same(now: Any, before: Any) -> bool:
    return bool(await now == before)


def no_more(now: dict[int, int], before: dict[int, int], most: int) -> bool:
    return now.keys() == before.keys() and all(now[pid] <= before[pid] + most for pid in before)


@pytest.mark.parametrize(
    ("num_first", "count"),
    [(50, 60), pytest.param(750, 3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_mixed_requests_leave_nothing_behind(
    fleet: Fleet, redis: Redis, num_first: int, count: int
) -> None:
    ignored = {key async for key in redis.scan_iter("*")}
    subscribed = await subscriptions(redis)
    async with random_clients(fleet, redis) as clients:
        await clients.learn_answers()
        await clients.send(num_first)
        await wait_until(lambda: idle(redis, ignored))
        before = await settled_tasks(redis), handles(fleet), memory(fleet)
        await clients.send(count)
        await wait_until(lambda: idle(redis, ignored))
        assert not grown(fleet, before[2])
    await wait_until(lambda: same(tasks(redis), before[0]))
    await wait_until(lambda: same(subscriptions(redis), subscribed))
    # connections to the broker are kept
    await wait_until(lambda: no_more(handles(fleet), before[1], MAX_COMMANDS))
    ttls = [await redis.ttl(key) for pattern in KEPT async for key in redis.scan_iter(pattern)]
    assert ttls and all(ttl != -1 and ttl <= 3600 for ttl in ttls)  # -1: for ever; -2: gone since
