"""How long a pool has had no worker."""

from redis.asyncio import Redis

from batcher.failure_detector import WorkerAbsence
from common.broker.heartbeat import Heartbeat
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient

KEYS = Keys("default")


async def test_only_a_pool_without_ready_and_starting_workers_waits(redis: Redis) -> None:
    now_s = 0.0
    pool = PoolClient(redis, KEYS)
    absence = WorkerAbsence(pool, 30.0, clock=lambda: now_s)
    assert not await absence.is_over_grace(False)
    now_s = 31.0
    assert await absence.is_over_grace(False)
    assert not await absence.is_over_grace(True)
    now_s = 62.0
    assert not await absence.is_over_grace(False), "it begins anew"
    now_s = 93.0
    starting = Heartbeat(pool, "starting", "w0-1", 5.0)
    await starting.send(doing="loading")
    assert not await absence.is_over_grace(False)
    await starting.remove()
    assert not await absence.is_over_grace(False)
    now_s = 124.0
    assert await absence.is_over_grace(False)
    await Heartbeat(pool, "sleeper", "w0-1", 5.0).send(state="asleep")
    assert not await absence.is_over_grace(False), "a worker serves other models, and comes"
