"""Rows that stand by beside a full batch: each request has exactly its tokens, whichever process dies."""

from collections.abc import Iterable

from redis.asyncio import Redis

from common.broker.pool_client import PoolClient
from common.broker.request_scripts import cancel_request
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS, error_of, queue, result_ids, seal
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import ModelessEngine, generate, modeless_worker
from tests.support.waiting import wait_until

PLACES = 16
NUM_REQUESTS, NUM_TOKENS = 24, 150
STEP_S = 0.005


def prompt(number: int) -> list[int]:
    return [1000 + number, 7, 8]


async def send(redis: Redis) -> None:
    for number in range(NUM_REQUESTS):
        await queue(redis, f"r{number}", prompt(number), NUM_TOKENS - 3 * number)


async def check_answers(redis: Redis, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert await result_ids(redis, f"r{number}") == generate(prompt(number), NUM_TOKENS - 3 * number)
    await wait_until(lambda: has_all_places(redis))


async def has_all_places(redis: Redis) -> bool:
    return not await redis.exists(KEYS.places)


async def states(redis: Redis, field: str) -> list[int]:
    found = [await redis.hget(KEYS.request(f"r{n}"), field) for n in range(NUM_REQUESTS)]  # type: ignore[misc]
    return [int(one or 0) for one in found]


async def stands_by(worker: ModelessEngine) -> int:
    """Return the row that stands by, once there is one: it has no token, and every place is taken."""

    def newest() -> int:
        rows = list(worker.rows.rows.values())
        return rows[-1].number if len(rows) > PLACES and not rows[-1].index else 0

    number: int = await wait_until(newest)
    return number


async def test_a_row_that_stands_by_is_adopted_by_the_next_batcher(broker: Broker, redis: Redis) -> None:
    async with modeless_worker(broker.url, "w0", step_s=STEP_S) as w0:
        await send(redis)
        with batcher(broker.url, "b0", MAX_BATCH_SIZE=str(PLACES)) as first:
            await stands_by(w0)
            first.kill()
            first.wait()
        with batcher(broker.url, "b1", MAX_BATCH_SIZE=str(PLACES)):
            await check_answers(redis, range(NUM_REQUESTS))
            assert await states(redis, "attempt") == [1] * NUM_REQUESTS, "nobody went elsewhere"
            await wait_until(lambda: not w0.owners)
        assert w0.most_rows == PLACES and w0.num_starts == NUM_REQUESTS


async def test_a_row_that_stands_by_goes_on_elsewhere_when_its_worker_dies(
    broker: Broker, redis: Redis
) -> None:
    await send(redis)
    with batcher(broker.url, "b0", MAX_BATCH_SIZE=str(PLACES)):
        async with modeless_worker(broker.url, "w0", step_s=STEP_S) as w0:
            await stands_by(w0)
        await seal(redis, "w0-1")
        async with modeless_worker(broker.url, "w1", step_s=STEP_S) as w1:
            await check_answers(redis, range(NUM_REQUESTS))
            assert max(await states(redis, "crash_count")) <= 1
            await wait_until(lambda: not w1.owners)
        assert w1.most_rows == PLACES


async def test_a_row_that_stands_by_can_be_cancelled(broker: Broker, redis: Redis) -> None:
    async with modeless_worker(broker.url, "w0", step_s=10 * STEP_S) as w0:
        await send(redis)
        with batcher(broker.url, "b0", MAX_BATCH_SIZE=str(PLACES)):
            name = f"r{w0.ids[await stands_by(w0)][0] - 1000}"
            await cancel_request(PoolClient(redis, KEYS), name)
            assert b"cancelled" in await wait_until(lambda: error_of(redis, name))
