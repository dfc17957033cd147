"""Batchers succeed each other, workers drain, and a whole pool is shut down: rows stay in place or go on
elsewhere, and every token comes once.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from functools import partial

import httpx
import psutil
import pytest
from redis.asyncio import Redis

from common.broker.heartbeat import Heartbeat
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from common.messages.events import Events
from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import queue, result_ids, seal
from tests.support.chaos.engine import generate
from tests.support.fleet.batchers import KEYS, active_batcher, batcher
from tests.support.fleet.gateways import GatewayProcesses
from tests.support.fleet.modeless_worker import ModelessEngine, modeless_worker
from tests.support.forks.command import tokenfleet
from tests.support.waiting import PATIENCE_S, wait_for, wait_until

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
    await wait_for(lambda: redis.exists(KEYS.places), 0)


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
            await wait_until(lambda: not w0.rows.rows)
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
            await wait_until(lambda: not w1.rows.rows)
        assert w1.most_rows == PLACES


CHANNEL = KEYS.events("g")
NUM_ROWS = 12
NUM_BATCHERS = 5
"""Number of batchers, one more than the test needs: one that gets no core for two seconds loses its lease."""
SHORT_GRANTS = {"HORIZON": "32"}
"""Even on a slow machine, forty more tokens need a batcher."""


def make_prompt(number: int) -> list[int]:
    return random.Random(number).sample(range(300, 30_000), 5 + 3 * number)


async def attempts(redis: Redis) -> set[bytes | None]:
    return {await redis.hget(KEYS.request(f"r{n}"), "attempt") for n in range(NUM_ROWS)}  # type: ignore[misc]


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
        wanted = [min(len(self.shown[f"r{n}"]) + count, NUM_TOKENS) for n in range(NUM_ROWS)]

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


@pytest.mark.slow
async def test_rows_stay_in_place_when_batchers_are_killed_suspended_and_drained(
    broker: Broker, redis: Redis, client: Client
) -> None:
    expected = [generate(make_prompt(n), NUM_TOKENS) for n in range(NUM_ROWS)]
    async with modeless_worker(broker.url, "w0") as one, modeless_worker(broker.url, "w1") as other:
        with contextlib.ExitStack() as stack:
            names = [f"b{i}" for i in range(NUM_BATCHERS)]
            processes = {
                name: stack.enter_context(batcher(broker.url, name, **SHORT_GRANTS)) for name in names
            }
            for number in range(NUM_ROWS):
                await queue(redis, f"r{number}", make_prompt(number), NUM_TOKENS, channel=CHANNEL)
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
            assert [await result_ids(redis, f"r{n}") for n in range(NUM_ROWS)] == expected
            assert await attempts(redis) == {b"1"}, "no request went elsewhere"
            await client.progress(NUM_TOKENS)
            assert [client.shown[f"r{n}"] for n in range(NUM_ROWS)] == expected
            await wait_until(lambda: not one.rows.rows and not other.rows.rows)
            await wait_until(lambda: no_blocks_in_use(redis))
    assert one.num_starts + other.num_starts == NUM_ROWS


async def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await wait_until(lambda: process.poll() is not None)


async def no_blocks_in_use(redis: Redis) -> bool:
    counts: list[bytes | None] = await redis.hmget(KEYS.state, ["blocks", "rows", "requests"])  # type: ignore[misc]
    return counts == [b"0", b"0", b"0"]


FEW_TOKENS = 60
Draining = asyncio.Task[subprocess.CompletedProcess[bytes]]


def short_prompt(number: int) -> list[int]:
    return [*range(300, 306 + number)]


async def send_short(redis: Redis, numbers: Iterable[int]) -> None:
    """Queue requests of clients of a live gateway."""
    await redis.set(KEYS.gateway("g"), 1)
    for number in numbers:
        await queue(redis, f"r{number}", short_prompt(number), FEW_TOKENS, gateway="g")


def drain(broker: Broker, worker: str) -> Draining:
    """Run `tokenfleet drain` in the background."""
    words = ["drain", worker, "--redis-url", broker.url]
    return asyncio.create_task(asyncio.to_thread(tokenfleet, *words, environ=os.environ))


async def check_short(redis: Redis, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert await result_ids(redis, f"r{number}") == generate(short_prompt(number), FEW_TOKENS)


async def attempts_of(redis: Redis, numbers: Iterable[int]) -> list[bytes | None]:
    return [await redis.hget(KEYS.request(f"r{number}"), "attempt") for number in numbers]  # type: ignore[misc]


def has_left(worker: ModelessEngine) -> bool:
    return worker.serving.done()


async def test_rows_of_a_drained_worker_go_on_elsewhere_and_it_gets_no_others(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0") as w0, modeless_worker(broker.url, "w1") as w1:
        with batcher(broker.url):
            await wait_until(lambda: counts(redis, "workers", 2))
            await send_short(redis, range(8))
            await wait_until(lambda: w0.num_starts + w1.num_starts == 8)
            await wait_until(lambda: min(w0.rows.step, w1.rows.step) > 5)
            before = w0.num_starts
            w0.step_s = w1.step_s = 0.5  # a command takes long to start on a busy machine
            draining = drain(broker, "w0")
            await wait_for(lambda: redis.hget(KEYS.worker("w0-1"), "state"), b"draining")
            w0.step_s = w1.step_s = 0.01
            done = await draining
            assert done.returncode == 0
            assert done.stdout.splitlines()[-1].startswith(b"w0-1 is gone; it was last ")
            await wait_until(lambda: has_left(w0))
            assert not w0.rows.rows, "it left empty"
            await send_short(redis, range(8, 10))
            await check_short(redis, range(10))
            assert w0.num_starts == before, "it got no other row"
            assert set(await attempts_of(redis, range(8))) == {b"1", b"2"}, (
                "each row moved once, or not at all"
            )


async def test_the_only_worker_finishes_its_rows_and_the_next_one_gets_what_waits(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0") as w0:
        with batcher(broker.url):
            await send_short(redis, range(3))
            await wait_until(lambda: w0.num_starts == 3 and w0.rows.step > 5)
            w0.step_s = 0.5  # a command takes long to start on a busy machine
            draining = drain(broker, "w0-1")
            await wait_for(lambda: redis.hget(KEYS.worker("w0-1"), "state"), b"draining")
            await send_short(redis, range(3, 5))
            w0.step_s = 0.01
            await check_short(redis, range(3))
            assert await attempts_of(redis, range(3)) == [b"1"] * 3, "their rows went on where they were"
            assert (await draining).returncode == 0
            async with modeless_worker(broker.url, "w1"):
                await check_short(redis, range(3, 5))


async def counts(redis: Redis, what: str, number: int) -> bool:
    return int(await redis.hget(KEYS.state, what) or 0) == number  # type: ignore[misc]


NUM_STREAMS = 6
PATIENT = {"HEARTBEAT_S": "1", "WORKER_TTL_S": "60"}
"""A batcher waits two heartbeats for others to show that they drain; a busy machine needs more time for that.
"""


async def frames(url: str, number: int, num_tokens: int = FEW_TOKENS) -> list[dict[str, object]]:
    """Return all frames of one stream."""
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
    body = {"inputs": f"number {number}", "parameters": parameters}
    async with (
        httpx.AsyncClient(timeout=90) as client,
        client.stream("POST", f"{url}/generate_stream", json=body) as response,
    ):
        return [json.loads(line[5:]) async for line in response.aiter_lines() if line.startswith("data:")]


def indices(stream: list[dict[str, object]]) -> list[object]:
    return [frame["index"] for frame in stream]


async def test_sigterm_to_all_processes_at_once_finishes_streams_that_run_and_that_wait(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0", step_s=0.2, max_batch_size=NUM_STREAMS // 2) as worker:
        with (
            batcher(broker.url, "b0", **PATIENT) as b0,
            batcher(broker.url, "b1", **PATIENT) as b1,
            GatewayProcesses(broker.url, 1) as gateways,
        ):
            await gateways.until_healthy()
            [g0] = gateways.processes
            streams = [asyncio.create_task(frames(gateways.url, number)) for number in range(NUM_STREAMS)]
            await wait_for(lambda: redis.xlen(KEYS.requests), NUM_STREAMS)
            await wait_until(lambda: worker.rows.step > 1)
            worker.draining.set()
            for process in (b0, b1, g0):
                process.send_signal(signal.SIGTERM)
            await wait_until(lambda: gateway_drains(redis))
            worker.step_s = 0.02
            whole = await asyncio.gather(*streams)
            assert [indices(one) for one in whole] == [[*range(1, FEW_TOKENS + 1)]] * NUM_STREAMS
            await asyncio.wait_for(asyncio.shield(worker.serving), PATIENCE_S)
            assert [await asyncio.to_thread(one.wait, PATIENCE_S) for one in (g0, b0, b1)] == [0, 0, 0]
    assert not await redis.keys("*:batcher:*"), "they left"


async def gateway_drains(redis: Redis) -> bool:
    """Whether the gateway says that it drains: all were told to end, and the batchers have had some time."""
    states = [await redis.hget(key, "state") async for key in redis.scan_iter(KEYS.gateway("*"))]  # type: ignore[misc]
    return states == [b"draining"]


async def test_a_standby_without_a_newer_heartbeat_does_not_count(broker: Broker, redis: Redis) -> None:
    """It may have been told to end at the same time."""
    pool = PoolClient(redis, KEYS)
    draining = Heartbeat(pool, "gateway", "g0", ttl_s=600)
    await draining.send(state="draining", streams=1)
    patient = {"WORKER_TTL_S": "600"}
    with batcher(broker.url, "b0", **patient) as b0:
        assert await active_batcher(redis) == "b0"
        with batcher(broker.url, "b1", **patient) as b1:
            await wait_until(lambda: has_beaten(pool, "b1", {}))
            b1.send_signal(signal.SIGSTOP)
            await wait_until(lambda: is_stopped(b1.pid))
            for process in (b0, b1):
                process.send_signal(signal.SIGTERM)
            for _ in range(6):
                await wait_until(partial(has_beaten, pool, "b0", await pool.processes("batcher")), 10)
                assert b0.poll() is None
            b1.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(b1.wait, PATIENCE_S) == 0
        with batcher(broker.url, "b2", **patient):
            assert await asyncio.to_thread(b0.wait, PATIENCE_S) == 0, "another stands by"


async def has_beaten(pool: PoolClient, name: str, before_ms: dict[str, float]) -> bool:
    """Whether a batcher has sent a newer heartbeat than these."""
    newer = dict((await pool.processes("batcher")).items() - before_ms.items())
    return any(batcher.startswith(name) for batcher in newer)


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


async def test_a_gateway_whose_time_is_over_ends_its_streams_with_an_error(
    broker: Broker, redis: Redis
) -> None:
    async with modeless_worker(broker.url, "w0"):
        with (
            batcher(broker.url) as b0,
            GatewayProcesses(broker.url, 1, GRACEFUL_TERMINATION_TIMEOUT="0.5") as gateways,
        ):
            await gateways.until_healthy()
            [g0] = gateways.processes
            stream = asyncio.create_task(frames(gateways.url, 1, 2000))
            await wait_until(lambda: redis.xlen(KEYS.requests))
            g0.send_signal(signal.SIGTERM)
            *_, last = await stream
            assert (last["error_type"], "shut down" in str(last["error"])) == ("shutdown", True)
            await wait_for(lambda: redis.xlen(KEYS.requests), 0)
            assert await asyncio.to_thread(g0.wait, PATIENCE_S) == 0 and b0.poll() is None
