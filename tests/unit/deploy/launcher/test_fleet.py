"""The processes of a fleet: their ports, what is preloaded, what is said of starts, deaths and the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from batcher.lease import Lease
from common.broker.heartbeat import Heartbeat
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.process import machine
from common.process.launch import LOAD_FLAG, PRELOAD_FLAG, WEIGHTS_VARIABLE
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.launcher import (
    GATEWAY_BYTES,
    RANK_BYTES,
    LocalFleet,
    describe_wait,
    is_stopped,
    last_lines,
    new_fleet,
    preload_flags,
    report_death,
    sharing_weights,
)
from deploy.launcher.process import Restarts, family
from tests.support.waiting import wait_until_sync

# --- fleet --------------------------------------------------------------------------------------------------


def test_each_process_gets_its_own_ports() -> None:
    fleet = new_fleet(
        Settings(num_workers=2, num_gateways=2, num_jobs=1, metrics_port=9000, gateway_port=8000), None
    )
    ports = {process.name: process.environ["METRICS_PORT"] for process in fleet.all}
    assert ports == {"b0": "9000", "w0": "9001", "w1": "9002", "g0": "9003", "g1": "9004", "j0": "9005"}
    assert [process.environ["GATEWAY_PORT"] for process in fleet.gateways] == ["8000", "8001"]


def test_ports_above_the_highest_are_refused() -> None:
    with pytest.raises(SettingError, match="METRICS_PORT: 65533 leaves no room for 4 ports up to 65535"):
        new_fleet(Settings(metrics_port=65_533), None)


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        (
            {"port": 9001, "metrics_port": 9000},
            "METRICS_PORT: from 9000 on, 4 are needed, but 9001 is for PORT",
        ),
        (
            {"gateway_port": 8003, "metrics_port": 8000},
            "METRICS_PORT: from 8000 on, 4 are needed, but 8003 is for GATEWAY_PORT",
        ),
    ],
)
def test_overlapping_port_ranges_are_refused(ports: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        new_fleet(Settings(**ports), None)


# --- fleet preload flags ------------------------------------------------------------------------------------

WORKER_BYTES = 2 * RANK_BYTES
CACHE_BYTES = 3 * 2**20
SETTINGS: dict[str, Any] = {"device": "cpu", "num_workers": 2, "kv_cache_bytes": CACHE_BYTES}


@pytest.mark.parametrize(
    ("spare_bytes", "settings", "flags"),
    [
        (2 * WORKER_BYTES, {}, [PRELOAD_FLAG, LOAD_FLAG]),
        (2 * WORKER_BYTES - 1, {}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES, {}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES - 1, {}, []),
        (2 * RANK_BYTES - 1, {"preload": True}, [PRELOAD_FLAG]),
        (2 * RANK_BYTES, {"num_shard": 2}, []),
        (2 * WORKER_BYTES, {"num_shard": 2}, [PRELOAD_FLAG]),
        (4 * WORKER_BYTES, {"device": "cuda"}, [PRELOAD_FLAG]),
    ],
)
def test_a_worker_is_preloaded_with_its_model_or_without(
    spare_bytes: int, settings: dict[str, Any], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caches of all workers may still take is not free. Ranks and GPUs load for themselves."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * CACHE_BYTES + spare_bytes)
    assert preload_flags(Settings(**SETTINGS | settings), "worker", WORKER_BYTES) == flags


def test_a_model_of_unknown_size_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc nobody knows what a worker takes: a second model might fill the memory."""
    monkeypatch.setattr(machine, "available_bytes", lambda: 2**40)
    assert preload_flags(Settings(**SETTINGS), "worker") == [PRELOAD_FLAG]


@pytest.mark.parametrize(
    ("spare_bytes", "wanted", "flags"),
    [
        (2 * GATEWAY_BYTES, None, [PRELOAD_FLAG]),
        (2 * GATEWAY_BYTES - 1, None, []),
        (2 * GATEWAY_BYTES - 1, True, [PRELOAD_FLAG]),
    ],
)
def test_a_gateway_is_preloaded(
    spare_bytes: int, wanted: bool | None, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * CACHE_BYTES + spare_bytes)
    assert preload_flags(Settings(**SETTINGS, preload=wanted), "gateway") == flags


# --- fleet shared weights -----------------------------------------------------------------------------------

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


@pytest.mark.parametrize(("device", "shares"), [("cpu", True), ("cuda", False)])
def test_workers_on_cpu_inherit_the_same_memory(device: Any, shares: bool) -> None:
    fleet = new_fleet(Settings(device=device, num_workers=2, redis_url="redis://localhost"), None)
    with sharing_weights(fleet):
        workers: list[Any] = [*fleet.workers, *(one for one in fleet.preloaded if one.kind == "worker")]
        handles = {one.environ.get(WEIGHTS_VARIABLE) for one in workers}
        assert len(workers) == 3 and len(handles) == 1 and (handles != {None}) == shares
        assert not any(WEIGHTS_VARIABLE in one.environ for one in [*fleet.gateways, *fleet.batchers])
    for handle in handles - {None}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(int(handle or -1))


# --- startup ------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(broker: Broker) -> Iterator[LocalFleet]:
    fleet = new_fleet(Settings(redis_url=broker.url, num_workers=2, preload=False), None)
    for worker in fleet.workers:
        worker.incarnation = f"{worker.name}-1"
    yield fleet


async def test_a_worker_that_says_nothing_for_a_moment_does_what_it_did_last(
    fleet: LocalFleet, redis: Redis
) -> None:
    last: dict[str, str] = {}
    async with PoolClient.connect(fleet.settings) as pool:
        assert await describe_wait(fleet, pool, last) == "w0 w1: starting"
        heartbeat = Heartbeat(pool, "starting", "w0-1", ttl_s=60)
        await heartbeat.send(doing="loading a model")
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await heartbeat.remove()
        assert await describe_wait(fleet, pool, last) == "w0: loading a model, w1: starting"
        await redis.set(pool.keys.worker("w0-1"), "its heartbeat")
        assert await describe_wait(fleet, pool, last) == "w1: starting"


def test_the_command_to_try_has_a_proxys_address_and_the_header_of_a_key_but_not_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "Authorization" not in last_lines(Settings())
    monkeypatch.setenv("PUBLIC_URL", "https://a.io:443")
    said = last_lines(Settings(api_key="secret"))
    assert '-H "Authorization: Bearer $API_KEY"' in said and "secret" not in said
    assert "curl -N https://a.io:443/generate_stream" in said


# --- supervised process -------------------------------------------------------------------------------------


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(lived_s=0.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_a_long_life_resets_the_pause() -> None:
    restarts = Restarts()
    for _ in range(6):
        restarts.pause_s(lived_s=0.0)
    assert restarts.pause_s(lived_s=60.0) == 0
    assert [restarts.pause_s(lived_s=0.0) for _ in range(3)] == [0, 0.5, 1]


# --- launcher deaths ----------------------------------------------------------------------------------------

KEYS = Keys("default")


@pytest.fixture
def settings(broker: Broker) -> Settings:
    return Settings(redis_url=broker.url)


async def test_the_lease_of_a_dead_batcher_is_free_at_once(redis: Redis, settings: Settings) -> None:
    """That of another one stays."""
    pool = PoolClient(redis, KEYS)
    dead, other = Lease(pool, "b0-1", 60), Lease(pool, "b1-1", 60)
    await dead.acquire()
    await report_death(settings, "batcher", "b1-1")
    assert await redis.get(KEYS.batcher) == b"b0-1"
    await report_death(settings, "batcher", "b0-1")
    await other.acquire()
    await report_death(settings, "batcher", "b0-1")
    assert await redis.get(KEYS.batcher) == b"b1-1"


async def test_a_dead_gateway_is_marked_until_its_heartbeat_expires(redis: Redis, settings: Settings) -> None:
    """One that has left by itself is not there again."""
    await redis.hset(KEYS.gateway("g0-1"), "streams", "3")  # type: ignore[misc]
    await redis.pexpire(KEYS.gateway("g0-1"), 5000)
    for name in ("g0-1", "g1-1"):
        await report_death(settings, "gateway", name)
    assert await redis.hget(KEYS.gateway("g0-1"), "state") == b"died"  # type: ignore[misc]
    assert await redis.pttl(KEYS.gateway("g0-1")) <= 5000
    assert not await redis.exists(KEYS.gateway("g1-1"))


# --- launcher stopped ---------------------------------------------------------------------------------------

FAMILY = "import subprocess; subprocess.run(['sleep', '600'])"


@pytest.fixture
def parent() -> Iterator[psutil.Process]:
    """A process that has started another."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True) as process:
        found = psutil.Process(process.pid)
        wait_until_sync(found.children)
        yield found
        os.killpg(process.pid, signal.SIGKILL)


def stops(parent: psutil.Process) -> list[int]:
    return [pid for pid in family(parent.pid) if is_stopped(pid)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_is_found_and_lasts_until_its_process_goes_on(parent: psutil.Process, number: int) -> None:
    victim = [parent, *parent.children()][number]
    assert not stops(parent)
    victim.suspend()
    assert wait_until_sync(lambda: stops(parent)) == [victim.pid]
    victim.resume()
    wait_until_sync(lambda: not stops(parent))
