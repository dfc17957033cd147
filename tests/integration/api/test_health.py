"""/health, /metrics and /fleet while the batcher is stopped, hangs or is absent, or a worker is down."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.admin.processes import ProcessList, judge_processes
from api.requests import monitors
from api.requests.monitors import SILENT_S
from batcher.loop import Batcher
from batcher.process import serve
from common.broker.keys import Keys
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.api_errors import tgi_error
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

KEYS = Keys("default")


async def status_code(client: httpx.AsyncClient) -> int:
    return (await client.get("/health")).status_code


async def is_healthy(client: httpx.AsyncClient) -> bool:
    return await status_code(client) == 200


async def is_unhealthy(client: httpx.AsyncClient) -> bool:
    return await status_code(client) == 503


async def batchers(client: httpx.AsyncClient) -> dict[str, float]:
    """The gauge of batchers, by state."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {
        line.split('state="')[1].split('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("tokenfleet_batchers{")
    }


async def health(client: httpx.AsyncClient, *workers: FakeWorker) -> dict[str, str]:
    """Return what is said of the fleet right after a heartbeat of these workers."""
    for worker in workers:
        await worker.announce()
    found: dict[str, str] = (await client.get("/fleet")).json()["health"]
    return found


async def test_a_stopped_batcher_is_503_and_named_until_it_goes_on(broker: Broker) -> None:
    """It is not named before two leases are over: until then a standby may take over."""
    async with answering(broker.url, Answer([11]), heartbeat_s=0.5) as (worker, gateway, client):
        refused = await client.get("/health")
        assert tgi_error(refused) == (503, "healthcheck") and "no batcher is active yet" in refused.text
        with batcher(broker.url, WORKER_TTL_S="60") as process:
            await wait_until(lambda: is_healthy(client))
            assert await batchers(client) == {"active": 1, "standby": 0}
            assert await health(client, worker) == {"state": "good", "text": "1 worker ready"}
            os.kill(process.pid, signal.SIGSTOP)
            await wait_until(lambda: is_unhealthy(client))
            assert gateway.pool.batcher.gone_s >= SILENT_S
            refused = await client.get("/health")
            assert tgi_error(refused) == (503, "healthcheck")
            assert "no batcher is active: none has worked for" in refused.text
            assert (await batchers(client))["active"] == 0
            found = await health(client)
            assert found["state"] == "bad" and "none has worked for" in found["text"]
            os.kill(process.pid, signal.SIGCONT)
            await wait_until(lambda: is_healthy(client))
            assert await batchers(client) == {"active": 1, "standby": 0}


async def test_a_batcher_whose_loop_hangs_keeps_the_lease_and_is_503(
    broker: Broker, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of its own renews the lease; only the loop's heartbeat shows that the loop runs."""
    turns = asyncio.Event()
    run_pending = Batcher.run_pending

    async def hang(batcher: Batcher) -> bool:
        await turns.wait()
        return await run_pending(batcher)

    monkeypatch.setattr(Batcher, "run_pending", hang)
    monkeypatch.setattr(monitors, "SILENT_S", 1.0)
    settings = Settings(redis_url=broker.url, heartbeat_s=0.1, worker_ttl_s=60.0)
    async with answering(broker.url, Answer([11])) as (_, _, client):
        turns.set()
        running = asyncio.create_task(serve(settings, "b0-1"))
        await wait_until(lambda: is_healthy(client))
        turns.clear()
        await wait_until(lambda: is_unhealthy(client))
        assert await redis.get(KEYS.batcher) == b"b0-1"
        assert "the active batcher b0-1 hangs" in (await client.get("/health")).text
        assert (await batchers(client))["active"] == 0
        turns.set()
        await wait_until(lambda: is_healthy(client))
        os.kill(os.getpid(), signal.SIGTERM)
        await running


async def test_a_standby_is_counted_and_keeps_the_fleet_healthy(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (_, _, client):
        with batcher(broker.url, "b0") as first, batcher(broker.url, "b1"):
            await wait_until(lambda: counts(client, active=1, standby=1))
            first.kill()
            first.wait()
            await wait_until(lambda: counts(client, active=1, standby=0))
            await wait_until(lambda: is_healthy(client))


async def counts(client: httpx.AsyncClient, **expected: int) -> bool:
    found = await batchers(client)
    return all(found[state] == count for state, count in expected.items())


async def test_a_missing_worker_is_a_warning(broker: Broker) -> None:
    """`serve` tells its gateways how many workers there are."""
    async with batching(broker.url), answering(broker.url, Answer([11]), num_workers=2) as (one, _, client):
        await wait_until(lambda: is_healthy(client))
        assert await health(client, one) == {"state": "warn", "text": "1 of 2 workers ready"}
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as other:
            assert await health(client, one, other) == {"state": "good", "text": "2 workers ready"}


async def test_workers_that_do_not_answer_the_batcher_are_named(broker: Broker, redis: Redis) -> None:
    async with batching(broker.url), answering(broker.url, Answer([11])) as (one, _, client):
        await wait_until(lambda: is_healthy(client))
        await redis.hset(KEYS.state, "silent", one.incarnation)  # type: ignore[misc]
        await wait_until(lambda: is_unhealthy(client))
        text = f"no worker answers the batcher: {one.incarnation}"
        assert text in (await client.get("/health")).text
        assert await health(client, one) == {"state": "bad", "text": f"Service unavailable: {text}"}
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as other:
            await wait_until(lambda: is_healthy(client))
            assert await health(client, one, other) == {"state": "warn", "text": "1 of 2 workers ready"}


def worker(state: str = "ready", age_s: float = 0.1) -> dict[str, Any]:
    return {"kind": "worker", "state": state, "age_s": age_s}


ACTIVE = {"kind": "batcher", "active": True}


@pytest.mark.parametrize(
    ("processes", "num_workers", "expected"),
    [
        ([ACTIVE, worker()], 1, ("good", "1 worker ready")),
        ([ACTIVE, worker(), worker()], 1, ("good", "2 workers ready")),
        ([ACTIVE, worker(), worker("starting")], 1, ("warn", "1 of 2 workers ready")),
        ([ACTIVE, worker(), worker(age_s=4.5)], 1, ("warn", "1 of 2 workers ready")),
        ([ACTIVE, worker(), worker("draining")], 2, ("warn", "1 of 2 workers ready")),
        ([ACTIVE, worker()], 3, ("warn", "1 of 3 workers ready")),
        ([{**ACTIVE, "active": False}, worker()], 1, ("warn", "no batcher is active")),
        ([ACTIVE, worker("asleep")], 1, ("good", "1 worker, asleep until a request comes")),
        ([ACTIVE, worker("starting")], 1, ("bad", "no worker is ready")),
        ([], 1, ("bad", "no worker is ready")),
    ],
)
def test_processes_are_judged(
    processes: list[dict[str, Any]], num_workers: int, expected: tuple[str, str]
) -> None:
    assert judge_processes(ProcessList(0.0, 0, processes), num_workers) == expected
