"""A batcher succeeds another over workers with many rows and long logs: once, and no request is touched."""

import asyncio
import signal

import pytest
from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS
from tests.support.fleet.batchers import active_batcher, batcher
from tests.support.fleet.full_pool import FullPool
from tests.support.waiting import wait_until

SIZES = [(2, 96, 48), pytest.param(64, 256, 63, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("workers", "rows", "flushes"), SIZES)
async def test_one_takeover_adopts_every_row_of_a_full_pool(
    broker: Broker, redis: Redis, workers: int, rows: int, flushes: int
) -> None:
    """There are two batchers, which would succeed each other if the lease were not renewed meanwhile."""
    pool = FullPool(redis, workers, rows, flushes)
    await pool.fill()
    answering = asyncio.create_task(pool.answer(pool.names))
    with batcher(broker.url, "b0", WORKER_TTL_S="60"), batcher(broker.url, "b1", WORKER_TTL_S="60"):
        await wait_until(lambda: len(pool.first_plans) == workers)
        epoch = await redis.get(KEYS.epoch)
        await wait_until(lambda: counted(redis, workers * rows))
        assert await redis.get(KEYS.epoch) == epoch
        assert not pool.starts, "no request was touched"
        for request_id in pool.requests(pool.names[-1]):
            state = await redis.hmget(KEYS.request(request_id), ["worker", "attempt"])  # type: ignore[misc]
            assert state == [pool.names[-1].encode(), b"1"]
    answering.cancel()


async def counted(redis: Redis, num_rows: int) -> bool:
    rows, requests = await redis.hmget(KEYS.state, ["rows", "requests"])  # type: ignore[misc]
    return int(rows or 0) == int(requests or 0) == num_rows


@pytest.mark.parametrize(("workers", "rows", "flushes"), SIZES)
async def test_every_token_of_a_pool_that_died_with_its_batcher_is_kept_and_each_request_resumes_once(
    broker: Broker, redis: Redis, workers: int, rows: int, flushes: int
) -> None:
    """Spare workers take as many requests as they can; the batcher is stopped and killed meanwhile."""
    pool = FullPool(redis, workers, rows, flushes)
    await pool.fill()
    await pool.kill(pool.names)
    spares = ["s0-1", "s1-1"]
    for spare in spares:
        await pool.open_worker(spare)
    answering = asyncio.create_task(pool.answer(spares))
    with batcher(broker.url, "b0", WORKER_TTL_S="60") as first:
        await wait_until(lambda: is_removed(redis, pool.names[0]))
        first.send_signal(signal.SIGSTOP)
        with batcher(broker.url, "b1", WORKER_TTL_S="60"):
            await active_batcher(redis, "b0")
            await wait_until(lambda: all_removed(redis, pool))
            await wait_until(lambda: pool.first_plans.keys() == set(spares))
            first.send_signal(signal.SIGCONT)
            await wait_until(lambda: first.poll() is not None)
            assert first.returncode == 1, "its lease is lost"
            for worker in pool.names:
                for request_id in pool.requests(worker):
                    assert await redis.get(KEYS.tokens(request_id)) == pool.records(request_id)
            assert pool.starts, "spares took some"
            for attempts in pool.starts.values():
                assert attempts in ([2], [3], [2, 3]), "once by each batcher"
    answering.cancel()


async def is_removed(redis: Redis, worker: str) -> bool:
    return not await redis.exists(KEYS.log(worker))


async def all_removed(redis: Redis, pool: FullPool) -> bool:
    return not await redis.exists(*(KEYS.log(worker) for worker in pool.names))
