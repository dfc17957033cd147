"""All processes of a pool get SIGTERM at once, as when a machine shuts down: streams are finished."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import httpx
import psutil
from redis.asyncio import Redis

from common.broker.heartbeat import Heartbeat
from common.broker.pool_client import PoolClient
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import KEYS, active_batcher, batcher
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.forks.client import ForkedProcess
from tests.support.machine.ports import free_port
from tests.support.waiting import PATIENCE_S, wait_until

NUM_STREAMS, NUM_TOKENS = 6, 60
PATIENT = {"HEARTBEAT_S": "1", "WORKER_TTL_S": "60"}
"""A batcher waits two heartbeats for others to show that they drain; a busy machine needs more time for that.
"""


@contextlib.contextmanager
def gateway(url: str, port: int, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    variables = {
        "REDIS_URL": url,
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "HEARTBEAT_S": "0.1",
        **settings,
    }
    process = ForkedProcess([sys.executable, "-P", "-m", "api"], env=os.environ | variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def is_healthy(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
    return False


async def frames(port: int, number: int, num_tokens: int = NUM_TOKENS) -> list[dict[str, object]]:
    """Return all frames of one stream."""
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
    body = {"inputs": f"number {number}", "parameters": parameters}
    async with (
        httpx.AsyncClient(timeout=90) as client,
        client.stream("POST", f"http://127.0.0.1:{port}/generate_stream", json=body) as response,
    ):
        return [json.loads(line[5:]) async for line in response.aiter_lines() if line.startswith("data:")]


def indices(stream: list[dict[str, object]]) -> list[object]:
    return [frame["index"] for frame in stream]


async def test_sigterm_to_all_processes_at_once_finishes_streams_that_run_and_that_wait(
    broker: Broker, redis: Redis
) -> None:
    port = free_port()
    async with modeless_worker(broker.url, "w0", step_s=0.2, max_batch_size=NUM_STREAMS // 2) as worker:
        with (
            batcher(broker.url, "b0", **PATIENT) as b0,
            batcher(broker.url, "b1", **PATIENT) as b1,
            gateway(broker.url, port) as g0,
        ):
            await wait_until(lambda: is_healthy(port))
            streams = [asyncio.create_task(frames(port, number)) for number in range(NUM_STREAMS)]
            await wait_until(lambda: all_are_admitted(redis))
            await wait_until(lambda: worker.rows.step > 1)
            worker.draining.set()
            for process in (b0, b1, g0):
                process.send_signal(signal.SIGTERM)
            await wait_until(lambda: is_draining(redis))
            worker.step_s = 0.02
            whole = await asyncio.gather(*streams)
            assert [indices(one) for one in whole] == [[*range(1, NUM_TOKENS + 1)]] * NUM_STREAMS
            await asyncio.wait_for(asyncio.shield(worker.serving), PATIENCE_S)
            assert [await asyncio.to_thread(one.wait, PATIENCE_S) for one in (g0, b0, b1)] == [0, 0, 0]
    assert not await redis.keys("*:batcher:*"), "they left"


async def is_draining(redis: Redis) -> bool:
    """Whether the gateway says that it drains: all were told to end, and the batchers have had some time."""
    states = [await redis.hget(key, "state") async for key in redis.scan_iter(KEYS.gateway("*"))]  # type: ignore[misc]
    return states == [b"draining"]


async def all_are_admitted(redis: Redis) -> bool:
    return bool(await redis.xlen(KEYS.requests) == NUM_STREAMS)


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
    port = free_port()
    async with modeless_worker(broker.url, "w0"):
        with (
            batcher(broker.url) as b0,
            gateway(broker.url, port, GRACEFUL_TERMINATION_TIMEOUT="0.5") as g0,
        ):
            await wait_until(lambda: is_healthy(port))
            stream = asyncio.create_task(frames(port, 1, 2000))
            await wait_until(lambda: redis.xlen(KEYS.requests))
            g0.send_signal(signal.SIGTERM)
            *_, last = await stream
            assert (last["error_type"], "shut down" in str(last["error"])) == ("shutdown", True)
            await wait_until(lambda: is_settled(redis))
            assert await asyncio.to_thread(g0.wait, PATIENCE_S) == 0 and b0.poll() is None


async def is_settled(redis: Redis) -> bool:
    return not await redis.xlen(KEYS.requests)
