"""Workers that fall silent, lose their streams, or die together with the batcher: what they committed is
kept, their deaths count once, and their requests go on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.request_scripts import cancel_request
from batcher import worker_registry
from batcher.lease import Lease
from batcher.loop import Batcher
from common.broker import committed
from common.broker.client import ERRORS, connect
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from common.messages.records import unpack_records
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from gpu_worker.agent.grants import PlanStream
from gpu_worker.agent.publish import Flusher, Sealed
from tests.support import broker_state
from tests.support.broker_state import (
    KEYS,
    admit,
    error_of,
    make_request,
    make_tokens,
    place,
    queue,
    result_ids,
    seal,
    start_worker,
    write_log,
)
from tests.support.brokers import restorable
from tests.support.chaos.engine import generate
from tests.support.fleet.batchers import batcher
from tests.support.fleet.modeless_worker import ModelessEngine, modeless_worker
from tests.support.waiting import wait_for, wait_until

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


@pytest.mark.parametrize("what", [pytest.param("takeover", marks=pytest.mark.slow), "plans", "reports"])
async def test_rows_of_a_worker_whose_agent_hangs_go_on_elsewhere(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(worker_registry, "SILENT_S", 0.5)
    monkeypatch.setattr(worker_registry, "LOST_S", LOST_S)
    hung: set[str] = {"w0-1"} if what == "takeover" else set()
    if what == "reports":
        hang_when(monkeypatch, Flusher, "flush", lambda flusher: flusher.incarnation in hung)
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
                await wait_for(lambda: redis.hget(KEYS.state, "silent"), b"w0-1")
                assert [await result_ids(redis, f"r{n}") for n in range(8)] == [
                    generate(prompt(n), NUM_TOKENS) for n in range(8)
                ]
                await wait_until(lambda: w0.serving.done() or "w0-1.2" in batcher.scheduler.replicas)
                await wait_for(lambda: redis.hget(KEYS.state, "silent"), b"")
        assert not w1.serving.done()


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


async def is_removed(redis: Redis, worker: str = "w1") -> bool:
    return not await redis.exists(KEYS.log(worker), KEYS.reports(worker), KEYS.plans(worker))


PROMPT = [504, 905]


async def test_rows_are_released_before_the_next_incarnation_serves(broker: Broker, redis: Redis) -> None:
    """Row numbers and steps go on: the engine knows nothing of incarnations. The death of the process is the
    end of the last one, which finds its log sealed or gone.
    """
    ended = False
    with contextlib.suppress(Sealed):
        async with modeless_worker(broker.url, "w0") as engine:
            with batcher(broker.url, "b0"):
                await queue(redis, "lost", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                await wait_until(lambda: engine.rows.step > 5)
                await redis.flushall()
                await wait_until(lambda: redis.exists(KEYS.worker("w0-1.2")))
                assert not engine.rows.rows
                await queue(redis, "next", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                assert await result_ids(redis, "next") == generate(PROMPT, NUM_TOKENS)
                assert engine.last_row == engine.num_starts == 2
                await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w0-1"))})
                await wait_until(lambda: is_removed(redis, "w0-1.2"))
                ended = True
    assert ended


async def has_ended(redis: Redis) -> bool:
    """Whether the request has its end, and the batcher has removed it; False while the broker is away."""
    with contextlib.suppress(*ERRORS):
        has_terminal = await redis.hexists(KEYS.request("r"), "terminal")  # type: ignore[misc]
        return bool(has_terminal) and not await redis.xlen(KEYS.requests)
    return False


async def test_only_what_was_lost_is_computed_again_and_it_ends_once() -> None:
    with restorable() as restorable_broker:
        url = restorable_broker.broker.url
        async with connect(url) as redis, modeless_worker(url, "w0") as engine:
            with batcher(url, "b0"):
                await queue(redis, "r", PROMPT, NUM_TOKENS, channel=KEYS.events("g"))
                await wait_until(lambda: engine.rows.step > NUM_TOKENS // 2)
                engine.step_s = 0.2  # the end must not be in the copy
                num_kept = (await committed.read(PoolClient(redis, KEYS), ["r"]))["r"].num_tokens
                restorable_broker.keep()
                engine.step_s = 0.02
                await wait_until(lambda: has_ended(redis))
                restorable_broker.restore()
                await wait_until(lambda: engine.num_starts == 2)
                await wait_until(lambda: has_ended(redis))
                assert await result_ids(redis, "r") == generate(PROMPT, NUM_TOKENS)
                base = await redis.hget(KEYS.request("r"), "base")  # type: ignore[misc]
                assert int(base or 0) >= num_kept > 0
                await wait_until(lambda: not engine.rows.rows)
                assert engine.num_starts == 2


async def leave_log(redis: Redis, capacity: bytes | None = None) -> None:
    """Leave a worker's log with forty tokens of r1, and none of r2: it died after computing r2's prompt."""
    await start_worker(redis, "w1", capacity)
    for name in ("r1", "r2"):
        await admit(redis, make_request(name))
        await place(redis, name, "w1")
    for index in range(40):
        await write_log(redis, "w1", make_tokens("r1", index, [100 + index]))


async def kept_ids(redis: Redis) -> list[int]:
    return unpack_records(await redis.get(KEYS.tokens("r1")) or b"")[0]


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
        await wait_for(lambda: redis.exists(KEYS.sealed), 0)


async def test_a_cancel_said_while_no_batcher_was_active_is_obeyed_by_the_next(
    broker: Broker, redis: Redis
) -> None:
    """There is no worker, so nothing else would notice the cancel."""
    await admit(redis, make_request("r1"))
    await cancel_request(PoolClient(redis, KEYS), "r1")
    with batcher(broker.url):
        assert b"cancelled" in await wait_until(lambda: error_of(redis, "r1"))
        await wait_for(lambda: redis.xlen(KEYS.requests), 0)


async def test_the_death_of_a_worker_that_is_long_gone_ends_no_other(broker: Broker, redis: Redis) -> None:
    await redis.xadd(KEYS.control, {"died": encode(WorkerDied("w9"))})
    await start_worker(redis, "w1")
    with batcher(broker.url):
        await wait_until(lambda: redis.exists(KEYS.plans("w1")))
        await broker_state.send_heartbeat(redis, "w1")
        assert not await is_removed(redis)
