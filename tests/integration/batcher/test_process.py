"""The batcher process and a broker: waiting requests get their terminals, also when the stream `control` is
long or the broker's clock jumps. For that a small C library, preloaded, adds an offset to what the system
says, which is read from a file in memory. Monotonic time is not touched.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from redis.asyncio import Redis

from api.requests.request_scripts import cancel_request
from common.broker.client import connect
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.events import Events
from common.messages.request import Cancel, Generate, StoppingParams
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.broker.listening import listening
from tests.support.broker_state import KEYS, queue
from tests.support.fleet.batchers import CHANNEL, admit, batcher, ended, waiting
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.waiting import PATIENCE_S, wait_for, wait_until, wait_until_sync

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    offset_s = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += *offset_s;
    return answer;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}
"""


class JumpingBroker:
    """A broker, and the offset of its clock in seconds."""

    def __init__(self, broker: Broker, offset_file: Path) -> None:
        self.url = broker.url
        self.offset_file = offset_file
        self.offset_s = 0

    def jump(self, seconds: int) -> None:
        """Move the clock, and wait until the broker has seen it: Valkey reads the clock only every
        millisecond.
        """
        self.offset_s += seconds
        with self.offset_file.open("r+b") as file:
            file.write(struct.pack("l", self.offset_s))
        with redis.Redis.from_url(self.url) as client:
            wait_until_sync(lambda: abs(client.time()[0] - time.time() - self.offset_s) < abs(seconds) / 2)


@contextlib.contextmanager
def jumping_broker(directory: Path) -> Iterator[JumpingBroker]:
    """Start a broker of one's own; skip the test if there is no C compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source, library, offset_file = directory / "clock.c", directory / "clock.so", directory / "offset"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset_file.write_bytes(struct.pack("l", 0))
    environ = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset_file)}
    with brokers.running(environ=environ) as broker:
        yield JumpingBroker(broker, offset_file)


# --- process ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
async def gateway(redis: Redis) -> None:
    """A gateway with a heartbeat."""
    await redis.set(KEYS.gateway("g"), 1)


async def settled(redis: Redis) -> bool:
    return not await redis.xlen(KEYS.requests) and not await redis.exists(KEYS.places)


async def test_a_deadline_ends_a_waiting_request_with_one_terminal(broker: Broker, redis: Redis) -> None:
    """With SCALE_TO_ZERO nothing else does."""
    async with listening(redis, CHANNEL) as published:
        with batcher(broker.url, SCALE_TO_ZERO="true", WORKER_GRACE_S="0"):
            await admit(redis, "r1", ttl_ms=2000)
            assert (await ended(redis, "r1")).error_type == "timeout"
            await wait_until(lambda: settled(redis))
        terminals = [end for message in await published() for end in decode(Events, message).terminals]
        assert [(end.request_id, end.reason, end.error_type) for end in terminals] == [
            ("r1", "error", "timeout")
        ]


async def test_requests_of_a_dead_gateway_are_cancelled_after_their_grace(
    broker: Broker, redis: Redis
) -> None:
    with batcher(broker.url):
        await admit(redis, "r1", goes_on_ms=300)
        await admit(redis, "r2", goes_on_ms=600_000)
        await wait_until(lambda: waiting(redis, 2))
        await redis.delete(KEYS.gateway("g"))
        assert "gateway" in (await ended(redis, "r1")).error
        await wait_until(lambda: waiting(redis, 1))
        await wait_for(lambda: redis.hget(KEYS.places, "all"), b"1")
        assert not await redis.hexists(KEYS.request("r2"), "terminal")  # type: ignore[misc]


async def test_what_cannot_be_read_is_counted_and_removed_and_requests_are_answered(
    broker: Broker, redis: Redis
) -> None:
    payloads = (
        msgpack.packb({"v": 1, "id": "r1", "dg": "d"}),
        msgpack.packb({"v": 99, "id": "r2"}),
        encode(Generate("r3", "d", b"\0\0\0", StoppingParams(5))),
        encode(Generate("r4", "d", b"\0\0\0\0", StoppingParams(0))),
    )
    garbage: list[Any] = [
        {"generate": b"\xc1"},
        {"cancel": b""},
        {"x": "y"},
        {b"\xff": b"\xff"},
        {"died": msgpack.packb({"v": 1, "i": 5})},
    ]
    with batcher(broker.url) as process:
        for number, payload in enumerate(payloads, 1):
            await admit(redis, f"r{number}", payload=payload)
            assert (await ended(redis, f"r{number}")).error
            await wait_until(lambda: settled(redis))
            await wait_for(lambda: redis.hget(KEYS.state, "undecodable"), str(number).encode())
        for stream in (KEYS.requests, KEYS.control):
            for fields in garbage:
                await redis.xadd(stream, fields)
        await wait_for(lambda: redis.xlen(KEYS.requests), 0)
        await admit(redis, "r5", ttl_ms=1)
        assert (await ended(redis, "r5")).error_type == "timeout"
        assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_takes_over_the_waiting_requests(
    broker: Broker, redis: Redis, number: signal.Signals
) -> None:
    """One that was stopped has lost its lease when it goes on."""
    with batcher(broker.url, "b0") as first:
        await wait_until(lambda: redis.exists(KEYS.state))
        epoch = int(await redis.get(KEYS.epoch))
        with batcher(broker.url, "b1"):
            await admit(redis, "r1", ttl_ms=600_000)
            await wait_until(lambda: waiting(redis, 1))
            first.send_signal(number)
            await wait_until(lambda: begun(redis, epoch + 1))
            await redis.delete(KEYS.state)
            await wait_until(lambda: waiting(redis, 1))
            first.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(first.wait, PATIENCE_S) == (
                -number if number == signal.SIGKILL else 1
            )
            await cancel_request(PoolClient(redis, KEYS), "r1")
            assert (await ended(redis, "r1")).error_type == "cancelled"


async def begun(redis: Redis, epoch: int) -> bool:
    return int(await redis.get(KEYS.epoch)) >= epoch


async def test_without_workers_for_worker_grace_s_clients_get_an_error_and_jobs_wait(
    broker: Broker, redis: Redis
) -> None:
    with batcher(broker.url, WORKER_GRACE_S="0.5"):
        await admit(redis, "job", gateway="")
        await admit(redis, "r1")
        end = await ended(redis, "r1")
        assert (end.error_type, "WORKER_GRACE_S" in end.error) == ("unavailable", True)
        await wait_until(lambda: waiting(redis, 1))  # the job
        began_s = time.monotonic()
        await admit(redis, "late")
        await ended(redis, "late")
        assert time.monotonic() - began_s > 0.5, "it waits for that long itself"


async def test_requests_of_the_last_worker_end_with_an_error_after_worker_grace_s(
    broker: Broker, redis: Redis
) -> None:
    """Its client keeps the tokens that came until then."""
    with batcher(broker.url, WORKER_GRACE_S="0.5"):
        async with modeless_worker(broker.url, "w0") as engine:
            await queue(redis, "r1", [300, 301], 4000, channel=CHANNEL, gateway="g")
            await wait_until(lambda: any(len(ids) > 4 * 7 for ids in engine.ids.values()))
            assert await redis.hget(KEYS.request("r1"), "terminal") is None  # type: ignore[misc]
        await redis.delete(KEYS.worker("w0-1"))  # its heartbeat would last longer
        end = await ended(redis, "r1")
    assert (end.error_type, "WORKER_GRACE_S" in end.error) == ("unavailable", True)
    assert 0 < end.num_final < 4000


MANY = 11_000
SHORT = 500


async def cancel_many(redis: Redis) -> None:
    """Cancel as the script does for requests that are not known any more, in one message."""
    async with redis.pipeline(transaction=False) as pipe:
        for i in range(MANY):
            pipe.xadd(KEYS.control, {"cancel": encode(Cancel(f"gone{i}", "client"))})
        await pipe.execute()


async def test_a_stopped_batcher_obeys_a_cancel_that_thousands_followed(broker: Broker, redis: Redis) -> None:
    await redis.set(KEYS.gateway("g"), 1)
    with batcher(broker.url) as process:
        await admit(redis, "first")
        await wait_until(lambda: waiting(redis, 1))
        os.kill(process.pid, signal.SIGSTOP)
        await cancel_request(PoolClient(redis, KEYS), "first")
        await cancel_many(redis)
        await cancel_request(PoolClient(redis, KEYS), "gone")
        os.kill(process.pid, signal.SIGCONT)
        assert (await ended(redis, "first")).error_type == "cancelled"
        await wait_until(lambda: is_short(redis))


async def is_short(redis: Redis) -> bool:
    return int(await redis.xlen(KEYS.control)) < SHORT


QUARTER_S = 900
DECADES_S = 56 * 365 * 86_400  # a machine that starts in 1970 and then asks for the time
CENTURY_MS = 100 * 365 * 86_400_000
"""Results of ended requests must outlive a jump, too: on a slow machine a request ends before it."""


@pytest.fixture
def jumping(tmp_path: Path) -> Iterator[JumpingBroker]:
    with jumping_broker(tmp_path) as broker:
        yield broker


@pytest.fixture
async def jumping_redis(jumping: JumpingBroker) -> AsyncIterator[Redis]:
    async with connect(jumping.url) as client:
        await client.set(KEYS.gateway("g"), 1)
        yield client


async def admit_two(redis: Redis, short_ms: int) -> None:
    """Admit a request with much time, and one with little. Returns when the batcher has, or has had, both."""
    await admit(redis, "long", ttl_ms=600_000)
    await admit(redis, "short", ttl_ms=short_ms, kept_ms=CENTURY_MS)

    async def taken() -> bool:
        return await waiting(redis, 2) or bool(await redis.hexists(KEYS.request("short"), "terminal"))  # type: ignore[misc]

    await wait_until(taken)


async def two_rounds(redis: Redis) -> None:
    """Wait until the active batcher has done its housekeeping twice."""
    for _ in range(2):
        await redis.delete(KEYS.state)
        await wait_until(lambda: redis.exists(KEYS.state))


@pytest.mark.parametrize("jump_s", [DECADES_S, -QUARTER_S])
async def test_a_jump_of_the_broker_s_clock_moves_no_deadline(
    jumping: JumpingBroker, jumping_redis: Redis, jump_s: int
) -> None:
    with batcher(jumping.url):
        await wait_until(lambda: jumping_redis.exists(KEYS.state))
        await admit_two(jumping_redis, 1000)
        jumping.jump(jump_s)
        await two_rounds(jumping_redis)
        assert await jumping_redis.hget(KEYS.request("long"), "terminal") is None  # type: ignore[misc]
        assert await jumping_redis.hget(KEYS.request("long"), "channel") == CHANNEL.encode()  # type: ignore[misc]
        assert (await ended(jumping_redis, "short")).error_type == "timeout"
        await admit(jumping_redis, "next", ttl_ms=300)
        assert (await ended(jumping_redis, "next")).error_type == "timeout"
        await wait_until(lambda: waiting(jumping_redis, 1))


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [QUARTER_S, -QUARTER_S])
async def test_a_deadline_goes_on_at_a_takeover_with_the_time_that_was_left(
    jumping: JumpingBroker, jumping_redis: Redis, jump_s: int
) -> None:
    """After a jump back, the lease of the dead batcher would last for a quarter of an hour by the broker's
    clock.
    """
    with batcher(jumping.url, "b0"):
        await wait_until(lambda: jumping_redis.exists(KEYS.state))
        await admit_two(jumping_redis, 2500)
    jumping.jump(jump_s)
    await jumping_redis.delete(KEYS.state)
    with batcher(jumping.url, "b1"):
        assert (await ended(jumping_redis, "short")).error_type == "timeout"
        await wait_until(lambda: waiting(jumping_redis, 1))
