"""The broker refuses writes or loads its data: requests get a 503 with the cause, and no process ends."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest
import redis as redis_sync

from benchmarks.client import HttpStatusError, stream
from common.broker.acl import PROCESSES
from tests.support import brokers
from tests.support.fleet.fleet import Fleet
from tests.support.load import body
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
SETTINGS = {"num_workers": 1, "dtype": "float32", "kv_cache_bytes": "128MiB", "worker_ttl_s": 3}


@contextmanager
def full(redis: Any) -> Iterator[None]:
    redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        redis.config_set("maxmemory", 0)


@contextmanager
def read_only(redis: Any) -> Iterator[None]:
    redis.replicaof("127.0.0.1", 1)
    try:
        yield
    finally:
        redis.replicaof("NO", "ONE")


@contextmanager
def changed_password(redis: Any) -> Iterator[None]:
    for kind in PROCESSES:
        redis.execute_command("ACL", "SETUSER", kind, "resetpass", ">secret")
    for connections in ("normal", "pubsub"):
        redis.client_kill_filter(_type=connections, skipme=True)
    try:
        yield
    finally:
        for kind in PROCESSES:
            redis.execute_command("ACL", "SETUSER", kind, "nopass")


@contextmanager
def loading(redis: Any) -> Iterator[None]:
    """It loads its append-only file again and again; it answers others after every 1,024 commands."""
    with redis.pipeline(transaction=False) as pipe:
        for i in range(20_000):
            pipe.set(f"ballast:{i % 10}", i)
        pipe.execute()
    redis.config_set("key-load-delay", 200)  # microseconds a command
    enough = threading.Event()

    def load() -> None:
        while not enough.is_set():
            redis.execute_command("DEBUG", "LOADAOF")

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


async def check(fleet: Fleet, fails: Callable[[Any], AbstractContextManager[None]], word: str) -> None:
    """Both routes answer 503 with the cause while the broker fails, then the same processes serve again."""

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(base_url=fleet.base_url, timeout=90) as client:
            return await client.post("/generate", json=body(1, 3))

    async def names_the_cause() -> bool:
        found = await answer()
        return found.status_code == 503 and word in found.json()["error"].lower()

    async def stream_names_the_cause() -> bool:
        try:
            await stream(f"{fleet.base_url}/generate_stream", body(1, 3))
        except HttpStatusError as refusal:
            return refusal.status == 503 and word in refusal.body.decode().lower()
        return False

    async def serves() -> bool:
        return (await answer()).status_code == 200

    before = fleet.pids()
    with redis_sync.Redis.from_url(fleet.redis_url) as redis, fails(redis):
        await wait_until(names_the_cause)
        await wait_until(stream_names_the_cause)
    await wait_until(serves)
    assert fleet.pids() == before


@pytest.mark.parametrize(
    ("fails", "word"), [(full, "out of memory"), (read_only, "readonly"), (changed_password, "password")]
)
async def test_a_broker_that_fails_is_the_cause_in_a_503_and_ends_no_process(
    fleet: Fleet, fails: Callable[[Any], AbstractContextManager[None]], word: str
) -> None:
    await check(fleet, fails, word)


async def test_a_broker_that_loads_is_the_cause_in_a_503_and_ends_no_process() -> None:
    with (
        brokers.running("--enable-debug-command", "local") as broker,
        Fleet(**SETTINGS, redis_url=broker.url) as fleet,
    ):
        await check(fleet, loading, "loading")
