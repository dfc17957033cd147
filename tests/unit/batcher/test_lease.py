"""Lease: one holder at a time, epochs that rise, and a batcher that leaves when nobody needs it."""

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from batcher.lease import (
    HEARTBEATS_TO_SHOW,
    HeartbeatCount,
    Lease,
    LeaseLost,
    PoolClock,
    WritesLost,
    is_needed,
)
from common.broker.heartbeat import Heartbeat
from common.broker.keys import Keys
from common.broker.lua import Reply, ScriptCall
from common.broker.pool_client import PoolClient
from tests.support.waiting import wait_until

# --- lease --------------------------------------------------------------------------------------------------

KEYS = Keys("default")
LONG_S = 60.0


def make_lease(redis: Redis, holder: str, ttl_s: float = LONG_S) -> Lease:
    return Lease(PoolClient(redis, KEYS), holder, ttl_s)


async def test_a_released_lease_is_acquired_with_a_higher_epoch(redis: Redis) -> None:
    first = make_lease(redis, "b0")
    first_epoch = await first.acquire()
    waiting = asyncio.create_task(make_lease(redis, "b1", ttl_s=0.1).acquire())
    await first.release()
    assert await asyncio.wait_for(waiting, 10) > first_epoch


async def test_an_expired_lease_that_nobody_took_is_renewed(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    epoch = await lease.acquire()
    await redis.delete(KEYS.batcher)
    await lease.renew()
    assert lease.epoch == str(epoch) and await redis.get(KEYS.batcher) == b"b0"


async def test_a_broker_that_lost_everything_ends_the_epoch_and_not_the_batcher(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    await lease.acquire()
    await redis.flushall()
    with pytest.raises(WritesLost):
        await lease.renew()


async def test_renewing_after_a_newer_epoch_raises_though_nobody_holds_it_now(redis: Redis) -> None:
    lease, other = make_lease(redis, "b0"), make_lease(redis, "b1")
    await lease.acquire()
    await redis.delete(KEYS.batcher)
    await other.acquire()
    await other.release()
    with pytest.raises(LeaseLost):
        await lease.renew()


def fail_twice(lease: Lease) -> list[ConnectionError]:
    """Have the next two calls of the script fail. Returns those that have failed."""
    failures = list[ConnectionError]()

    class FailingPool(PoolClient):
        async def run(self, call: ScriptCall[Reply]) -> Reply:
            if len(failures) < 2:
                failures.append(ConnectionError("away"))
                raise failures[-1]
            return await super().run(call)

    lease.pool = FailingPool(lease.pool.redis, lease.pool.keys)
    return failures


async def test_releasing_without_a_broker_raises_nothing(redis: Redis) -> None:
    class AbsentPool(PoolClient):
        async def run(self, call: ScriptCall[Reply]) -> Reply:
            raise ConnectionError("away")

    lease = make_lease(redis, "b0")
    await lease.acquire()
    lease.pool = AbsentPool(redis, KEYS)
    await lease.release()
    assert await redis.get(KEYS.batcher) == b"b0"


async def test_it_is_kept_until_another_takes_it(redis: Redis) -> None:
    """While the broker fails, too."""
    lease = make_lease(redis, "b0", ttl_s=1.0)
    await lease.acquire()
    failures = fail_twice(lease)
    acquired_until_s = lease.expires_s
    keeping = asyncio.create_task(lease.renew_forever())
    await wait_until(lambda: lease.expires_s > acquired_until_s and len(failures) == 2)
    await redis.delete(KEYS.batcher)
    await redis.incr(KEYS.epoch)
    with pytest.raises(LeaseLost):
        await keeping


async def test_a_lease_that_may_have_expired_is_confirmed_by_the_broker(redis: Redis) -> None:
    lease = make_lease(redis, "b0")
    await lease.acquire()
    await redis.incr(KEYS.epoch)
    await lease.confirm()  # it cannot have expired
    lease.expires_s = 0.0
    with pytest.raises(LeaseLost):
        await lease.confirm()


async def test_the_holder_sets_the_pool_s_clock_and_a_successor_goes_on_from_there(redis: Redis) -> None:
    first = make_lease(redis, "b0")
    await first.acquire()
    first.clock = PoolClock(5000)
    await first.renew()
    assert int(await redis.get(KEYS.clock)) >= 5000
    await first.release()
    second = make_lease(redis, "b1")
    await second.acquire()
    assert 5000 <= second.clock.now_ms() < 65_000


async def test_a_lease_that_does_not_expire_is_taken_over_when_the_pool_s_clock_stops(redis: Redis) -> None:
    first = make_lease(redis, "b0")
    first_epoch = await first.acquire()
    await first.renew()
    assert await make_lease(redis, "b1", ttl_s=0.2).acquire() > first_epoch
    with pytest.raises(LeaseLost):
        await first.renew()


async def test_a_lease_is_not_taken_over_while_the_pool_s_clock_goes_on(redis: Redis) -> None:
    lease, standby = make_lease(redis, "b0"), make_lease(redis, "b1", ttl_s=0.0)
    await lease.acquire()
    await lease.renew()
    stopped_ms = await redis.get(KEYS.clock)
    assert await standby.watch_clock() == b"", "it was seen for the first time"
    lease.clock = PoolClock(60_000)
    await lease.renew()
    assert (await standby.run_script(LONG_S, stopped_ms))[0] == ""
    assert await standby.watch_clock() == b""


async def test_of_two_that_saw_the_pool_s_clock_stop_one_takes_the_lease(redis: Redis) -> None:
    dead = make_lease(redis, "b0")
    await dead.acquire()
    await dead.renew()
    first, second = (make_lease(redis, name) for name in ("b1", "b2"))
    stopped_ms = await redis.get(KEYS.clock)
    first.epoch, first.server_id = await first.run_script(LONG_S, stopped_ms)
    assert first.epoch and (await second.run_script(LONG_S, stopped_ms))[0] == ""
    await first.renew()


# --- lease departure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has_standby", "gateways", "stays"),
    [
        (False, [("draining", 3, True), ("ready", 0, True)], True),
        (True, [("draining", 3, True)], False),
        (False, [("draining", 0, False)], False),
        (False, [("ready", 3, True)], False),
        (False, [("died", 3, False)], False),
        (False, [], False),
        (True, [("ready", 0, False)], True),  # it has not shown yet whether it ends
    ],
)
async def test_it_stays_for_streams_of_gateways_that_end_with_it(
    redis: Redis, has_standby: bool, gateways: list[tuple[str, int, bool]], stays: bool
) -> None:
    """Of each gateway: its state, its streams, and whether it has shown since that it was told to end."""
    pool, seen = PoolClient(redis, KEYS), (HeartbeatCount(), HeartbeatCount())
    if has_standby:
        await Heartbeat(pool, "batcher", "b1", 60.0).send()
        seen[0].counts["b1"] = HEARTBEATS_TO_SHOW
    for i, (state, num_streams, is_believed) in enumerate(gateways):
        await Heartbeat(pool, "gateway", f"g{i}", 60.0).send(state=state, streams=num_streams)
        seen[1].counts[f"g{i}"] = HEARTBEATS_TO_SHOW * is_believed
    assert await is_needed(pool, "b0", *seen) is stays


def test_a_process_is_believed_by_two_heartbeats_behind_the_first_look() -> None:
    count = HeartbeatCount()
    for i, last_ms in enumerate((5.0, 5.0, 6.0, 6.0, 7.0)):
        count.look({"b1": last_ms, "gone": 1.0} if i < 3 else {"b1": last_ms})
        assert count.believes("b1") is (last_ms == 7.0)
    assert not count.believes("gone")
