"""Workers that fall silent, lose their streams, or die together with the batcher: what they committed stays,
their deaths count once, and their requests go on. Batchers succeed each other, workers drain, and a whole
pool is shut down: rows stay in place or go on elsewhere, and every token comes once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.request_scripts import cancel_request
from batcher import worker_registry
from batcher.lease import Lease
from batcher.loop import Batcher
from benchmarks.client import stream
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
from tests.support.fleet.gateways import GatewayProcesses
from tests.support.fleet.modeless_worker import ModelessEngine, modeless_worker
from tests.support.forks.command import tokenfleet
from tests.support.waiting import PATIENCE_S, in_background, wait_for, wait_until

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
    try:
        async with in_background(batcher.run()):
            yield batcher
    finally:
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


@pytest.mark.parametrize("kind", ["log", "reports", "plans"])
async def test_a_worker_whose_stream_another_key_has_replaced_harms_no_other(
    broker: Broker, redis: Redis, kind: str
) -> None:
    """It is sealed, or goes on as its next incarnation."""
    async with modeless_worker(broker.url, "w1"), batching(redis) as batcher:
        with contextlib.suppress(Sealed):
            async with modeless_worker(broker.url, "w0") as w0:
                await wait_until(lambda: len(batcher.scheduler.replicas) == 2)
                await redis.set(getattr(KEYS, kind)("w0-1"), "another's")
                for number in range(8):
                    await queue(redis, f"r{number}", prompt(number), NUM_TOKENS)
                if kind == "reports":
                    await wait_until(w0.serving.done)
                    await seal(redis, "w0-1")  # as its process does
                for number in range(8):
                    assert await result_ids(redis, f"r{number}") == generate(prompt(number), NUM_TOKENS)
                await wait_until(lambda: is_removed(redis, "w0-1"))


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


@pytest.mark.parametrize("how", ["heartbeat", "launcher", "engine", "drained", "another version"])
async def test_what_the_log_of_a_worker_says_that_died_before_this_epoch_is_kept(
    broker: Broker, redis: Redis, how: str
) -> None:
    """One of another version is none of this batcher's, as in a rolling upgrade: its end is no crash."""
    await leave_log(redis, b"junk" if how == "another version" else None)
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
    assert await crash_counts(redis) == [b"0", b"0" if how in ("drained", "another version") else b"1"]


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


# --- takeovers, drains and shutdowns ------------------------------------------------------------------------

PLACES = 16
NUM_REQUESTS, MANY_TOKENS = 24, 150
STEP_S = 0.005


def own_prompt(number: int) -> list[int]:
    return [1000 + number, 7, 8]


async def send(redis: Redis) -> None:
    for number in range(NUM_REQUESTS):
        await queue(redis, f"r{number}", own_prompt(number), MANY_TOKENS - 3 * number)


async def check_answers(redis: Redis, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert await result_ids(redis, f"r{number}") == generate(own_prompt(number), MANY_TOKENS - 3 * number)
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


Draining = asyncio.Task[subprocess.CompletedProcess[bytes]]


async def send_short(redis: Redis, numbers: Iterable[int]) -> None:
    """Queue requests of clients of a live gateway."""
    await redis.set(KEYS.gateway("g"), 1)
    for number in numbers:
        await queue(redis, f"r{number}", prompt(number), NUM_TOKENS, gateway="g")


def drain(broker: Broker, worker: str) -> Draining:
    """Run `tokenfleet drain` in the background."""
    words = ["drain", worker, "--redis-url", broker.url]
    return asyncio.create_task(asyncio.to_thread(tokenfleet, *words, environ=os.environ))


async def check_short(redis: Redis, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert await result_ids(redis, f"r{number}") == generate(prompt(number), NUM_TOKENS)


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


async def frames(url: str, number: int, num_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
    """Return all frames of one stream."""
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
    body = {"inputs": f"number {number}", "parameters": parameters}
    return (await stream(f"{url}/generate_stream", body)).frames


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
            b0.send_signal(signal.SIGINT)  # as from a terminal
            for process in (b1, g0):
                process.send_signal(signal.SIGTERM)
            await wait_until(lambda: gateway_drains(redis))
            worker.step_s = 0.02
            whole = await asyncio.gather(*streams)
            assert [[frame["index"] for frame in one] for one in whole] == [
                [*range(1, NUM_TOKENS + 1)]
            ] * NUM_STREAMS
            await asyncio.wait_for(asyncio.shield(worker.serving), PATIENCE_S)
            assert [await asyncio.to_thread(one.wait, PATIENCE_S) for one in (g0, b0, b1)] == [0, 0, 0]
    assert not await redis.keys("*:batcher:*"), "they left"


async def gateway_drains(redis: Redis) -> bool:
    """Whether the gateway says that it drains: all were told to end, and the batchers have had some time."""
    states = [await redis.hget(key, "state") async for key in redis.scan_iter(KEYS.gateway("*"))]  # type: ignore[misc]
    return states == [b"draining"]


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
            answer = asyncio.create_task(frames(gateways.url, 1, 2000))
            await wait_until(lambda: redis.xlen(KEYS.requests))
            g0.send_signal(signal.SIGTERM)
            *_, last = await answer
            assert (last["error_type"], "shut down" in str(last["error"])) == ("shutdown", True)
            await wait_for(lambda: redis.xlen(KEYS.requests), 0)
            assert await asyncio.to_thread(g0.wait, PATIENCE_S) == 0 and b0.poll() is None
