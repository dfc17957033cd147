"""A worker and the batcher die together: what its log says is kept, and its death counts."""

import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.broker.request_scripts import cancel_request
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.messages.records import unpack_records
from deploy.launcher.embedded_broker import Broker
from tests.support import broker_state
from tests.support.broker_state import (
    KEYS,
    admit,
    error_of,
    make_request,
    make_tokens,
    place,
    seal,
    start_worker,
    write_log,
)
from tests.support.fleet.batchers import batcher
from tests.support.waiting import wait_until


async def leave_log(redis: Redis, capacity: bytes | None = None) -> None:
    """Leave a worker's log with forty tokens of r1, and none of r2: it died after computing r2's prompt."""
    await start_worker(redis, "w1", capacity)
    for name in ("r1", "r2"):
        await admit(redis, make_request(name))
        await place(redis, name, "w1")
    for index in range(40):
        await write_log(redis, "w1", make_tokens("r1", index, [100 + index]))


async def is_removed(redis: Redis) -> bool:
    return not await redis.exists(KEYS.log("w1"), KEYS.reports("w1"), KEYS.plans("w1"))


async def kept_ids(redis: Redis, request_id: str = "r1") -> list[int]:
    return unpack_records(await redis.get(KEYS.tokens(request_id)) or b"")[0]


async def crash_counts(redis: Redis) -> list[bytes | None]:
    return [await redis.hget(KEYS.request(name), "crash_count") for name in ("r1", "r2")]  # type: ignore[misc]


@pytest.mark.parametrize("how", ["heartbeat", "launcher", "engine", "drained"])
async def test_what_the_log_of_a_worker_says_that_died_before_this_epoch_is_kept(
    broker: Broker, redis: Redis, how: str
) -> None:
    await leave_log(redis)
    match how:
        case "heartbeat":
            await redis.delete(KEYS.worker("w1"))
        case "launcher":
            await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w1"))})
        case "engine":
            await seal(redis, "w1")
        case "drained":
            await seal(redis, "w1", "drained")
    with batcher(broker.url):
        await wait_until(lambda: is_removed(redis))
    assert await kept_ids(redis) == list(range(100, 140))
    assert await crash_counts(redis) == [b"0", b"0" if how == "drained" else b"1"]


async def test_the_log_of_an_unreadable_worker_is_kept_and_its_end_is_no_crash(
    broker: Broker, redis: Redis
) -> None:
    """The worker has another version, as in a rolling upgrade."""
    await leave_log(redis, b"junk")
    with batcher(broker.url):
        await wait_until(lambda: is_removed(redis))
    assert await kept_ids(redis) == list(range(100, 140))
    assert await crash_counts(redis) == [b"0", b"0"]


async def test_a_death_counts_once_however_often_batchers_die_over_it(broker: Broker, redis: Redis) -> None:
    await leave_log(redis)
    await seal(redis, "w1")
    for name in ("b0", "b1"):
        with batcher(broker.url, name) as process:
            await wait_until(lambda: is_removed(redis))
            process.terminate()
            process.wait()
    assert await crash_counts(redis) == [b"0", b"1"]


async def test_three_deaths_without_a_token_fail_a_request_though_no_batcher_lived_through_two(
    broker: Broker, redis: Redis
) -> None:
    await leave_log(redis)
    for attempt in (2, 3):
        await seal(redis, "w1")
        with batcher(broker.url) as process:
            await wait_until(lambda: is_removed(redis))
            process.terminate()
            process.wait()
        assert not await error_of(redis, "r2")
        await start_worker(redis, "w1")
        await place(redis, "r2", "w1", attempt=attempt)
    await seal(redis, "w1")
    with batcher(broker.url):
        assert b"three workers died" in await wait_until(lambda: error_of(redis, "r2"))
    assert not await error_of(redis, "r1")


async def test_the_next_batcher_removes_a_worker_of_which_the_last_has_saved_every_request(
    broker: Broker, redis: Redis
) -> None:
    """The worker was sealed and no request named it; the last batcher died before it deleted the keys."""
    await leave_log(redis)
    await seal(redis, "w1")
    for name in ("r1", "r2"):
        await place(redis, name, "")
    with batcher(broker.url):
        await wait_until(lambda: is_removed(redis))
        await wait_until(lambda: is_forgotten(redis))


async def is_forgotten(redis: Redis) -> bool:
    return not await redis.exists(KEYS.sealed)


async def test_what_a_log_says_of_a_request_that_has_ended_is_not_written_again(
    broker: Broker, redis: Redis
) -> None:
    await leave_log(redis)
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    await seal(redis, "w1")
    with batcher(broker.url):
        await wait_until(lambda: is_removed(redis))
    assert await redis.exists(KEYS.tokens("r1")) == 0


async def test_a_cancel_said_while_no_batcher_was_active_is_obeyed_by_the_next(
    broker: Broker, redis: Redis
) -> None:
    """There is no worker, so nothing else would notice the cancel."""
    await admit(redis, make_request("r1"))
    await cancel_request(PoolClient(redis, KEYS), "r1")
    with batcher(broker.url):
        assert b"cancelled" in await wait_until(lambda: error_of(redis, "r1"))
        await wait_until(lambda: is_empty(redis, KEYS))


async def is_empty(redis: Redis, keys: Keys) -> bool:
    return not await redis.xlen(keys.requests)


async def test_the_death_of_a_worker_that_is_long_gone_ends_no_other(broker: Broker, redis: Redis) -> None:
    await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w9"))})
    await start_worker(redis, "w1")
    with batcher(broker.url):
        await wait_until(lambda: redis.exists(KEYS.plans("w1")))
        await broker_state.send_heartbeat(redis, "w1")
        assert not await is_removed(redis)
