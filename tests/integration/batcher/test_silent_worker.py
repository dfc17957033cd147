"""A worker whose heartbeats go on and that says nothing else is sealed; one whose step takes long is not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from batcher import worker_registry
from batcher.lease import Lease
from batcher.loop import Batcher
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from gpu_worker.agent.flush import Flusher
from gpu_worker.agent.grants import PlanStream
from gpu_worker.agent.publish import Sealed
from tests.support.broker_state import KEYS, queue, result_ids
from tests.support.fleet.modeless_worker import ModelessEngine, generate, modeless_worker
from tests.support.waiting import wait_until

NUM_TOKENS = 60
LOST_S = 1.5


def prompt(number: int) -> list[int]:
    return [*range(300, 306 + number)]


@contextlib.asynccontextmanager
async def batching(redis: Redis) -> AsyncIterator[Batcher]:
    """An active batcher in this process, so that a test can have less patience than it has."""
    pool = PoolClient(redis, KEYS)
    lease = Lease(pool, "b0-1", 60.0)
    batcher = Batcher(Settings(heartbeat_s=0.2, worker_ttl_s=0.5), pool, lease, await lease.acquire())
    running = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        running.cancel()
        await asyncio.wait([running])
        batcher.close()


def hang_when(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, hangs: Callable[[Any], bool]) -> None:
    """Have a coroutine never return where `hangs` says so."""
    real = getattr(kind, method)

    async def maybe(self: Any) -> Any:
        if hangs(self):
            await asyncio.Future()
        return await real(self)

    monkeypatch.setattr(kind, method, maybe)


@pytest.mark.parametrize("what", ["takeover", "plans", "reports"])
async def test_rows_of_a_worker_whose_agent_hangs_go_on_elsewhere(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(worker_registry, "SILENT_S", 0.5)
    monkeypatch.setattr(worker_registry, "LOST_S", LOST_S)
    hung: set[str] = {"w0-1"} if what == "takeover" else set()
    if what == "reports":
        hang_when(monkeypatch, Flusher, "flush", lambda flusher: flusher.publisher.incarnation in hung)
    else:
        hang_when(monkeypatch, PlanStream, "next", lambda stream: stream.name[-4:] in hung)
    async with modeless_worker(broker.url, "w1") as w1, batching(redis) as batcher:
        with contextlib.suppress(Sealed):  # it may learn that first
            async with modeless_worker(broker.url, "w0") as w0:
                await wait_until(lambda: len(batcher.scheduler.replicas) + len(hung) == 2)
                for number in range(8):
                    await queue(redis, f"r{number}", prompt(number), NUM_TOKENS)
                await wait_until(lambda: w0.num_starts + w1.num_starts == 8)
                hung.add("w0-1")
                await wait_until(lambda: says_silent(redis, b"w0-1"))
                assert [await result_ids(redis, f"r{n}") for n in range(8)] == [
                    generate(prompt(n), NUM_TOKENS) for n in range(8)
                ]
                await wait_until(lambda: w0.serving.done() or "w0-1.2" in batcher.scheduler.replicas)
                await wait_until(lambda: says_silent(redis, b""))
        assert not w1.serving.done()


async def says_silent(redis: Redis, names: bytes) -> bool:
    return await redis.hget(KEYS.state, "silent") == names  # type: ignore[misc,no-any-return]


async def test_a_worker_whose_step_takes_long_is_not_silent(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a long prompt, or while an engine compiles or loads an adapter."""
    monkeypatch.setattr(worker_registry, "LOST_S", LOST_S)
    async with modeless_worker(broker.url, "w0") as w0, batching(redis) as batcher:
        await queue(redis, "r1", prompt(1), NUM_TOKENS)
        await wait_until(lambda: w0.rows.step > 5)
        going = hold_steps(w0)
        await asyncio.sleep(2 * LOST_S)
        assert batcher.workers.lost == set()
        going.set()
        assert await result_ids(redis, "r1") == generate(prompt(1), NUM_TOKENS)
        assert w0.num_starts == 1


def hold_steps(worker: ModelessEngine) -> asyncio.Event:
    """Have its next step take until the event is set."""
    going = asyncio.Event()

    async def pause() -> None:
        await going.wait()

    worker.pause = pause  # type: ignore[method-assign]
    return going
