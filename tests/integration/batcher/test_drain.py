"""`tokenfleet drain`: a worker gives its rows to others and leaves; one that joins gets waiting requests."""

import asyncio
import os
import subprocess
from collections.abc import Iterable

from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS, queue, result_ids
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import ModelessEngine, generate, modeless_worker
from tests.support.forks.command import tokenfleet
from tests.support.waiting import wait_until

NUM_TOKENS = 60
Draining = asyncio.Task[subprocess.CompletedProcess[bytes]]


def prompt(number: int) -> list[int]:
    return [*range(300, 306 + number)]


async def send(redis: Redis, numbers: Iterable[int], num_tokens: int = NUM_TOKENS) -> None:
    """Queue requests of clients of a live gateway."""
    await redis.set(KEYS.gateway("g"), 1)
    for number in numbers:
        await queue(redis, f"r{number}", prompt(number), num_tokens, gateway="g")


def drain(broker: Broker, worker: str) -> Draining:
    """Run `tokenfleet drain` in the background."""
    words = ["drain", worker, "--redis-url", broker.url]
    return asyncio.create_task(asyncio.to_thread(tokenfleet, *words, environ=os.environ))


async def check_answers(redis: Redis, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert await result_ids(redis, f"r{number}") == generate(prompt(number), NUM_TOKENS)


async def attempts(redis: Redis, numbers: Iterable[int]) -> list[bytes | None]:
    return [await redis.hget(KEYS.request(f"r{number}"), "attempt") for number in numbers]  # type: ignore[misc]


def has_left(worker: ModelessEngine) -> bool:
    return worker.serving.done()


async def test_rows_of_a_drained_worker_go_on_elsewhere_and_it_gets_no_others(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0") as w0, modeless_worker(broker.url, "w1") as w1:
        with batcher(broker.url):
            await wait_until(lambda: counts(redis, "workers", 2))
            await send(redis, range(8))
            await wait_until(lambda: w0.num_starts + w1.num_starts == 8)
            await wait_until(lambda: min(w0.rows.step, w1.rows.step) > 5)
            before = w0.num_starts
            w0.step_s = w1.step_s = 0.5  # a command takes long to start on a busy machine
            draining = drain(broker, "w0")
            await wait_until(lambda: is_draining(redis))
            w0.step_s = w1.step_s = 0.01
            done = await draining
            assert done.returncode == 0
            assert done.stdout.splitlines()[-1].startswith(b"w0-1 is gone; it was last ")
            await wait_until(lambda: has_left(w0))
            assert not w0.owners, "it left empty"
            await send(redis, range(8, 10))
            await check_answers(redis, range(10))
            assert w0.num_starts == before, "it got no other row"
            assert set(await attempts(redis, range(8))) == {b"1", b"2"}, "each row moved once, or not at all"


async def test_the_only_worker_finishes_its_rows_and_the_next_one_gets_what_waits(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0") as w0:
        with batcher(broker.url):
            await send(redis, range(3))
            await wait_until(lambda: w0.num_starts == 3 and w0.rows.step > 5)
            w0.step_s = 0.5  # a command takes long to start on a busy machine
            draining = drain(broker, "w0-1")
            await wait_until(lambda: is_draining(redis))
            await send(redis, range(3, 5))
            w0.step_s = 0.01
            await check_answers(redis, range(3))
            assert await attempts(redis, range(3)) == [b"1"] * 3, "their rows went on where they were"
            assert (await draining).returncode == 0
            async with modeless_worker(broker.url, "w1"):
                await check_answers(redis, range(3, 5))


async def is_draining(redis: Redis) -> bool:
    return bool(await redis.hget(KEYS.worker("w0-1"), "state") == b"draining")  # type: ignore[misc]


async def test_a_worker_that_joins_gets_what_waits_for_a_row_of_another(broker: Broker, redis: Redis) -> None:
    """The rows of the other worker end long after that."""
    async with modeless_worker(broker.url, "w0", max_batch_size=2):
        with batcher(broker.url, MAX_BATCH_SIZE="2"):
            await send(redis, range(2), num_tokens=5000)
            await wait_until(lambda: counts(redis, "rows", 2))
            await send(redis, range(2, 4))
            async with modeless_worker(broker.url, "w1", max_batch_size=2):
                await check_answers(redis, range(2, 4))
                assert await attempts(redis, range(2)) == [b"1"] * 2


async def counts(redis: Redis, what: str, number: int) -> bool:
    return int(await redis.hget(KEYS.state, what) or 0) == number  # type: ignore[misc]
