"""The broker refuses writes or loads its data: requests get a 503 with the cause, and no process ends."""

import asyncio

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

SETTINGS = {
    "num_workers": 2,
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "128MiB",
    "worker_ttl_s": 3,
}


async def refused(fleet: Fleet, word: str) -> None:
    """Returns when both routes answer 503 with the cause."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=90) as client:

        async def names_the_cause() -> bool:
            answer = await client.post("/generate", json=body(1, 3))
            return answer.status_code == 503 and word in answer.json()["error"].lower()

        await wait_until(names_the_cause)

    async def stream_names_the_cause() -> bool:
        try:
            await stream(f"{fleet.base_url}/generate_stream", body(1, 3))
        except HttpStatusError as refusal:
            return refusal.status == 503 and word in refusal.body.decode().lower()
        return False

    await wait_until(stream_names_the_cause)


async def serves(fleet: Fleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as client:

        async def answers() -> bool:
            return (await client.post("/generate", json=body(1, 3))).status_code == 200

        await wait_until(answers)


def pids(fleet: Fleet) -> dict[str, int]:
    return {name: pid for name, pid in fleet.pids().items() if name != "broker"}


async def test_a_full_broker_is_the_cause_in_a_503_and_ends_no_process(fleet: Fleet) -> None:
    before = pids(fleet)
    with redis_sync.Redis.from_url(fleet.redis_url) as redis:
        redis.config_set("maxmemory", 1)
        try:
            await refused(fleet, "out of memory")
        finally:
            redis.config_set("maxmemory", 0)
    await serves(fleet)
    assert pids(fleet) == before


async def test_a_read_only_broker_is_the_cause_in_a_503_and_ends_no_process(fleet: Fleet) -> None:
    before = pids(fleet)
    with redis_sync.Redis.from_url(fleet.redis_url) as redis:
        redis.replicaof("127.0.0.1", 1)
        try:
            await refused(fleet, "readonly")
        finally:
            redis.replicaof("NO", "ONE")
    await serves(fleet)
    assert pids(fleet) == before


async def test_a_changed_password_is_the_cause_in_a_503_and_ends_no_process(fleet: Fleet) -> None:
    before = pids(fleet)
    with redis_sync.Redis.from_url(fleet.redis_url) as redis:
        for kind in PROCESSES:
            redis.execute_command("ACL", "SETUSER", kind, "resetpass", ">secret")
        redis.client_kill_filter(_type="normal", skipme=True)
        redis.client_kill_filter(_type="pubsub", skipme=True)
        try:
            await refused(fleet, "password")
        finally:
            for kind in PROCESSES:
                redis.execute_command("ACL", "SETUSER", kind, "nopass")
    await serves(fleet)
    assert pids(fleet) == before


async def test_a_loading_broker_is_the_cause_in_a_503_and_ends_no_process() -> None:
    with (
        brokers.running("--enable-debug-command", "local") as broker,
        Fleet(**SETTINGS, redis_url=broker.url) as fleet,
    ):
        before = pids(fleet)
        with redis_sync.Redis.from_url(broker.url) as redis:
            with redis.pipeline(transaction=False) as pipe:
                for i in range(20_000):
                    pipe.set(f"ballast:{i % 10}", i)
                pipe.execute()
            redis.config_set(
                "key-load-delay", 200
            )  # microseconds a command; it answers others after every 1,024
            enough = asyncio.Event()
            loads = asyncio.create_task(load_until(enough, broker.url))
            await refused(fleet, "loading")
            enough.set()
            await loads
        await serves(fleet)
        assert pids(fleet) == before


async def load_until(enough: asyncio.Event, url: str) -> None:
    """Make the broker load its AOF again and again."""
    while not enough.is_set():
        assert await asyncio.to_thread(load_aof, url)


def load_aof(url: str) -> bool:
    with redis_sync.Redis.from_url(url) as redis:
        return bool(redis.execute_command("DEBUG", "LOADAOF"))
