"""Batchers succeed each other while rows run: rows stay in place, and every token comes once."""

import contextlib
import random
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from common.broker.pool_client import PoolClient
from common.broker.request_scripts import cancel_request
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS, error_of, queue, result_ids, seal
from tests.support.fleet.batchers import active_batcher, batcher
from tests.support.fleet.modeless_worker import generate, modeless_worker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

CHANNEL = KEYS.events("g")
NUM_REQUESTS, NUM_TOKENS = 12, 150
NUM_BATCHERS = 5
"""Number of batchers, one more than the test needs: one that gets no core for two seconds loses its lease."""
SHORT_GRANTS = {"HORIZON": "32"}
"""Even on a slow machine, forty more tokens need a batcher."""


def make_prompt(number: int) -> list[int]:
    return random.Random(number).sample(range(300, 30_000), 5 + 3 * number)


async def send(redis: Redis, number: int, num_tokens: int = NUM_TOKENS) -> None:
    await queue(redis, f"r{number}", make_prompt(number), num_tokens, channel=CHANNEL)


async def attempts(redis: Redis) -> set[bytes | None]:
    return {await redis.hget(KEYS.request(f"r{n}"), "attempt") for n in range(NUM_REQUESTS)}  # type: ignore[misc]


class Client:
    """What a gateway would show: the tokens of each request, each exactly once."""

    def __init__(self, redis: Redis) -> None:
        self.pubsub = redis.pubsub()
        self.shown: defaultdict[str, list[int]] = defaultdict(list)

    async def read(self) -> None:
        while (message := await self.pubsub.get_message(timeout=0)) is not None:
            if message["type"] == "message":
                for tokens in decode(Events, message["data"]).all_tokens:
                    assert tokens.index == len(self.shown[tokens.request_id]), "no token is lost or repeated"
                    self.shown[tokens.request_id] += unpack_ids(tokens.ids)

    async def progress(self, count: int) -> None:
        """Wait until every request has `tokens` more tokens, or all of its tokens."""
        await self.read()
        wanted = [min(len(self.shown[f"r{n}"]) + count, NUM_TOKENS) for n in range(NUM_REQUESTS)]

        async def is_reached() -> bool:
            await self.read()
            return all(len(self.shown[f"r{n}"]) >= most for n, most in enumerate(wanted))

        await wait_until(is_reached)


@pytest.fixture
async def client(redis: Redis) -> AsyncIterator[Client]:
    one = Client(redis)
    async with one.pubsub:
        await one.pubsub.subscribe(CHANNEL)
        yield one


async def test_rows_stay_in_place_when_batchers_are_killed_suspended_and_drained(
    broker: Broker, redis: Redis, client: Client
) -> None:
    expected = [generate(make_prompt(n), NUM_TOKENS) for n in range(NUM_REQUESTS)]
    async with modeless_worker(broker.url, "w0") as one, modeless_worker(broker.url, "w1") as other:
        with contextlib.ExitStack() as stack:
            names = [f"b{i}" for i in range(NUM_BATCHERS)]
            processes = {
                name: stack.enter_context(batcher(broker.url, name, **SHORT_GRANTS)) for name in names
            }
            for number in range(NUM_REQUESTS):
                await send(redis, number)
            await client.progress(10)
            killed = await active_batcher(redis)
            processes[killed].kill()
            suspended = await active_batcher(redis, killed)
            await client.progress(40)
            processes[suspended].send_signal(signal.SIGSTOP)
            last = await active_batcher(redis, killed, suspended)
            await client.progress(40)
            processes[suspended].send_signal(signal.SIGCONT)
            await wait_until(lambda: processes[suspended].poll() is not None)
            assert processes[suspended].returncode == 1, "its lease is lost"
            await terminate(processes[last])
            assert [await result_ids(redis, f"r{n}") for n in range(NUM_REQUESTS)] == expected
            assert await attempts(redis) == {b"1"}, "no request went elsewhere"
            await client.progress(NUM_TOKENS)
            assert [client.shown[f"r{n}"] for n in range(NUM_REQUESTS)] == expected
            await wait_until(lambda: not one.owners and not other.owners)
            await wait_until(lambda: no_blocks_in_use(redis))
    assert one.num_starts + other.num_starts == NUM_REQUESTS


async def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await wait_until(lambda: process.poll() is not None)


async def no_blocks_in_use(redis: Redis) -> bool:
    counts: list[bytes | None] = await redis.hmget(KEYS.state, ["blocks", "rows", "requests"])  # type: ignore[misc]
    return counts == [b"0", b"0", b"0"]


async def test_cancels_deaths_and_new_requests_between_two_batchers(broker: Broker, redis: Redis) -> None:
    """A row that is cancelled meanwhile is stopped where it is; rows of a dead worker go to the other."""
    async with modeless_worker(broker.url, "w0", max_batch_size=64) as one:
        with batcher(broker.url, "b0") as first:
            async with modeless_worker(broker.url, "w1") as other:
                await wait_until(lambda: has_both_workers(redis))
                for number in range(NUM_REQUESTS):
                    await send(redis, number)
                await wait_until(lambda: all_started(redis))
                await wait_until(lambda: one.num_starts + other.num_starts == NUM_REQUESTS)
                assert one.num_starts and other.num_starts
                first.kill()
                first.wait()
        held = [n for n in range(NUM_REQUESTS) if await holder(redis, n) == b"w0-1"]
        cancelled = held[0]
        await cancel_request(PoolClient(redis, KEYS), f"r{cancelled}")
        await seal(redis, "w1-1")
        with batcher(broker.url, "b1"):
            assert b"cancelled" in await wait_until(lambda: error_of(redis, f"r{cancelled}"))
            for number in set(range(NUM_REQUESTS)) - {cancelled}:
                assert await result_ids(redis, f"r{number}") == generate(make_prompt(number), NUM_TOKENS)
            await wait_until(lambda: no_blocks_in_use(redis))
        assert one.num_starts == NUM_REQUESTS, "those of the dead worker came, and none started twice"
        assert not one.owners


async def has_both_workers(redis: Redis) -> bool:
    return bool(await redis.hget(KEYS.state, "workers") == b"2")  # type: ignore[misc]


async def holder(redis: Redis, number: int) -> bytes | None:
    worker: bytes | None = await redis.hget(KEYS.request(f"r{number}"), "worker")  # type: ignore[misc]
    return worker


async def all_started(redis: Redis) -> bool:
    return all([await holder(redis, number) for number in range(NUM_REQUESTS)])
