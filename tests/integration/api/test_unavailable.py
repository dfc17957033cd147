"""429 while the queue is full, and 503 while no worker is ready or the broker does not answer."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis

from api import errors
from api.requests import admission
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.api_errors import tgi_error
from tests.support.fleet.gateways import answering, ready, serving, stream
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

BODY = {"inputs": "a"}


@pytest.mark.parametrize(
    "limits", [{"max_concurrent_requests": 1}, {"max_queued_tokens": 1}, {"max_queued_bytes": 500}]
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_full_queue_is_429_before_any_frame(
    broker: Broker, limits: dict[str, Any], path: str
) -> None:
    async with answering(broker.url, Answer([11]), **limits) as (worker, gateway, client):
        await worker.pause()
        first = asyncio.create_task(stream(client, BODY))
        await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
        second = await client.post(path, json=BODY)
        assert (tgi_error(second), second.json()["error"]) == ((429, "overloaded"), "Model is overloaded")
        assert len(gateway.pool.relay.streams) == 1
        worker.going.set()
        await first
        await wait_until(lambda: not worker.live)
        assert (await client.post(path, json=BODY)).status_code == 200


async def test_503_before_a_worker_is_ready(broker: Broker) -> None:
    async with (
        serving(broker.url) as (gateway, client),
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
    ):
        await ready(gateway)
        await worker.announce("draining")
    async with serving(broker.url) as (gateway, client):
        response = await client.post("/generate_stream", json=BODY)
        assert tgi_error(response) == (503, "unavailable") and "no worker is ready yet" in response.text
        assert response.headers["retry-after"] == str(errors.LOADING_S)


async def test_workers_are_read_again_before_a_503(broker: Broker) -> None:
    """Another gateway may have seen the worker first, and the client may know that it is ready."""
    async with serving(broker.url, heartbeat_s=3600) as (_, client):
        assert (await client.post("/generate", json=BODY)).status_code == 503
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await wait_until(lambda: worker.redis.zcard(worker.keys.workers))
            await wait_until(lambda: answers(client))


async def test_503_after_the_last_worker_died(broker: Broker) -> None:
    """Requests wait for the next one for worker_grace_s; then they are refused. The limits of the dead worker
    are still known.
    """
    async with batching(broker.url), serving(broker.url, worker_grace_s=2.0) as (gateway, client):
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await worker.pause()
            await worker.announce()  # a slow start may outlast its heartbeat
            await ready(gateway)
            waiting = asyncio.create_task(client.post("/generate", json=BODY))
            await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
            await worker.redis.delete(worker.keys.workers)
        await wait_until(lambda: gateway.pool.workers.ready_s + 2.0 < asyncio.get_running_loop().time())  # type: ignore[operator]
        response = await client.post("/generate", json=BODY)
        assert tgi_error(response) == (503, "unavailable") and "no worker for" in response.text
        assert gateway.pool.workers.max_total_tokens == 1024
        assert not waiting.done()
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])):
            assert (await waiting).status_code == 200
            await ready(gateway)


async def test_503_long_after_the_last_batcher_worked(broker: Broker) -> None:
    """A queued request would not be placed then, nor ended at its deadline."""
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
        serving(broker.url, worker_grace_s=1.0) as (gateway, client),
    ):

        async def served() -> bool:
            await worker.announce()  # a slow start may outlast its heartbeat
            return await answers(client)

        async with batching(broker.url):
            await wait_until(lambda: gateway.pool.batcher.works)
            await wait_until(served)

        async def refused() -> bool:
            await worker.announce()
            response = await client.post("/generate", json=BODY)
            return response.status_code == 503 and "no batcher is active" in response.text

        await wait_until(refused)
        async with batching(broker.url):
            await wait_until(served)


@pytest.fixture
def own_broker() -> Iterator[Broker]:
    with brokers.running() as broker:
        yield broker


async def test_503_names_the_broker_s_error(own_broker: Broker) -> None:
    """As soon as the broker works again, requests are served."""
    admin = redis.Redis.from_url(own_broker.url)
    password = redis.Redis.from_url(own_broker.url, password="secret")
    troubles = {
        "out of memory": (lambda: admin.config_set("maxmemory", 1), lambda: admin.config_set("maxmemory", 0)),
        "READONLY": (lambda: admin.replicaof("127.0.0.1", "1"), lambda: admin.replicaof("NO", "ONE")),
        "refused user name or password": (
            lambda: (admin.config_set("requirepass", "secret"), kill_all(admin)),  # type: ignore[func-returns-value]
            lambda: password.config_set("requirepass", ""),
        ),
    }
    async with (
        working(own_broker.url, TOKENIZER, lambda _: Answer([11])),
        serving(own_broker.url) as (gateway, client),
    ):
        for words, (begin, end) in troubles.items():
            await ready(gateway)
            begin()  # type: ignore[no-untyped-call]

            async def refused(words: str = words) -> bool:
                response = await client.post("/generate_stream", json=BODY)
                return (
                    response.status_code == 503
                    and tgi_error(response) == (503, "unavailable")
                    and words in response.text
                )

            await wait_until(refused)
            end()  # type: ignore[no-untyped-call]

            async def served() -> bool:
                return (await client.post("/generate", json=BODY)).status_code == 200

            await wait_until(served)
        await wait_until(lambda: not gateway.pool.relay.streams)


def kill_all(admin: redis.Redis) -> None:
    for client in admin.client_list():  # type: ignore[union-attr]
        if client["id"] != str(admin.client_id()):
            admin.client_kill_filter(_id=client["id"], skipme=True)


@pytest.mark.slow
async def test_503_while_the_broker_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, errors):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    with brokers.running() as broker:
        pid = redis.Redis.from_url(broker.url).info("server")["process_id"]  # type: ignore[index]
        async with answering(broker.url, Answer([11])) as (_, gateway, client):
            os.kill(pid, signal.SIGSTOP)
            response = await client.post("/generate", json=BODY)
            assert tgi_error(response) == (503, "unavailable") and "did not answer in time" in response.text
            for path in ("/fleet", "/fleet/requests/r", "/v1/models/other"):
                response = await client.get(path)
                assert response.status_code == 503 and "did not answer in time" in response.text
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["smollm2"]
            os.kill(pid, signal.SIGCONT)
            await wait_until(lambda: not gateway.pool.relay.streams)
            await wait_until(lambda: answers(client))
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: gateway.pool.relay.last_error)

            async def refused() -> bool:
                response = await client.post("/generate", json=BODY)
                assert tgi_error(response) == (503, "unavailable")
                return "no connection to the broker" in response.text

            await wait_until(refused)
            for path in ("/health", "/readyz"):
                assert tgi_error(await client.get(path)) == (503, "healthcheck")
            live = await client.get("/livez")
            assert (live.status_code, live.content) == (200, b""), "the gateway itself is well"
            assert (await client.head("/livez")).status_code == 200
            assert (await client.get("/load")).status_code == 200


@pytest.mark.parametrize(("num_answered", "status"), [(1, 429), (0, 503)])
async def test_a_request_whose_turn_does_not_come_is_429_while_the_broker_answers_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, num_answered: int, status: int
) -> None:
    monkeypatch.setattr(admission, "CONNECT_TIMEOUT_S", 0.2)
    async with answering(broker.url, Answer([11])) as (worker, gateway, client):
        own = gateway.pool.admission
        for _ in range(admission.MAX_COMMANDS):
            await own.admissions.acquire()
        waiting = asyncio.create_task(client.post("/generate", json=BODY))
        await wait_until(lambda: gateway.pool.relay.streams)
        own.num_answered += num_answered
        response = await waiting
        assert response.status_code == status, response.text
        assert response.headers.get("retry-after") == ("1" if status == 429 else None)
        assert not worker.live
        for _ in range(admission.MAX_COMMANDS):
            own.admissions.release()
        await wait_until(lambda: not gateway.pool.relay.streams)
        await wait_until(lambda: answers(client))


async def answers(client: httpx.AsyncClient) -> bool:
    return (await client.post("/generate", json=BODY)).status_code == 200
