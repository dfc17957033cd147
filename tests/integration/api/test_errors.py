"""Refusals that are not about the content of a request: its family's error object for every one of them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis

from api import errors
from api.errors import ApiError, failed, invalid, overloaded, unavailable
from api.http.error_handlers import error_response
from api.inference import admission
from common.messages.events import Terminal
from deploy.serve.broker import Broker
from tests.support import brokers
from tests.support.fleet.gateways import model_tokenizer, ready, serving, stream
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.waiting import wait_until

TOKENIZER = model_tokenizer().backend
BODY = {"inputs": "a"}
JSON = {"content-type": "application/json"}


def told(response: httpx.Response) -> tuple[int, str]:
    answer = response.json()
    assert set(answer) == {"error", "error_type"} and answer["error"]
    return response.status_code, answer["error_type"]


async def test_unreadable_bodies_are_refused(broker: Broker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1000

    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([1])),
        serving(broker.url, payload_limit=5000) as (gateway, client),
    ):
        await ready(gateway)
        large = await client.post("/generate", content=b"x" * 5001, headers=JSON)
        assert told(large) == (413, "payload_too_large") and "5000 bytes" in large.text
        assert told(await client.post("/generate", content=endless(), headers=JSON)) == (
            413,
            "payload_too_large",
        )
        assert told(
            await client.post("/generate_stream", content=b"{}", headers={"content-type": "text/plain"})
        ) == (
            415,
            "unsupported_media_type",
        )
        assert told(await client.post("/generate", content=b"{}")) == (415, "unsupported_media_type")
        odd = {"content-type": "Application/vnd.api+JSON; charset=utf-8"}
        assert (await client.post("/generate", content=b'{"inputs":"a"}', headers=odd)).status_code == 200
        assert (
            await client.post(
                "/generate",
                content=b'{"inputs":"' + b"a" * 4900 + b'","parameters":{"truncate":5}}',
                headers=JSON,
            )
        ).status_code == 200


def told_by_openai(response: httpx.Response) -> tuple[int, str, str | None]:
    answer = response.json()
    assert (
        set(answer) == {"error"}
        and set(answer["error"]) == {"message", "type", "param", "code"}
        and answer["error"]["message"]
    )
    return response.status_code, answer["error"]["type"], answer["error"]["code"]


async def test_unknown_routes_and_methods(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        assert told(await client.get("/nothing")) == (404, "not_found")
        assert told(await client.get("/v11")) == (404, "not_found")
        wrong = await client.get("/generate")
        assert told(wrong) == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
        assert (await client.put("/")).headers["allow"] == "GET, HEAD, POST"
        for path in ("/v1", "/v1/nothing"):
            assert told_by_openai(await client.get(path)) == (404, "invalid_request_error", None)
        wrong = await client.get("/v1/completions")
        assert (
            told_by_openai(wrong) == (405, "invalid_request_error", None) and wrong.headers["allow"] == "POST"
        )


@pytest.mark.parametrize(
    "garbage", [b"garbage\r\n\r\n", b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n"]
)
async def test_requests_that_are_not_http_get_400(broker: Broker, garbage: bytes) -> None:
    async with serving(broker.url) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(garbage)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"x-request-id: " in head
    assert json.loads(body) == {"error": "Invalid HTTP request received.", "error_type": "bad_request"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_unreadable_bodies_are_refused_on_openai_s_routes(broker: Broker, path: str) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([1])),
        serving(broker.url, payload_limit=100) as (gateway, client),
    ):
        await ready(gateway)
        cases = [
            (b"x" * 101, JSON, 413),
            (b"{}", {"content-type": "text/plain"}, 415),
            (b"{", JSON, 400),
            (b"[]", JSON, 400),
        ]
        for content, headers, status in cases:
            answer = await client.post(path, content=content, headers=headers)
            assert told_by_openai(answer) == (status, "invalid_request_error", None)


REFUSALS = [
    (ApiError(400, "invalid_json", "x"), 400, "invalid_request_error", None),
    (ApiError(401, "unauthorized", "x"), 401, "authentication_error", "invalid_api_key"),
    (
        ApiError(404, "model_not_found", "x", "model", "model_not_found"),
        404,
        "invalid_request_error",
        "model_not_found",
    ),
    (ApiError(413, "payload_too_large", "x"), 413, "invalid_request_error", None),
    (ApiError(415, "unsupported_media_type", "x"), 415, "invalid_request_error", None),
    (invalid("x", "stop"), 400, "invalid_request_error", None),
    (failed(Terminal("r", "error", 0, "two workers died")), 500, "server_error", None),
    (overloaded(), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (unavailable("no worker"), 503, "server_error", None),
]


@pytest.mark.parametrize(("refusal", "status", "kind", "code"), REFUSALS)
def test_an_error_in_both_api_families(refusal: ApiError, status: int, kind: str, code: str | None) -> None:
    answer = {"error": {"message": refusal.text, "type": kind, "param": refusal.param, "code": code}}
    for path in ("/v1/chat/completions", "/v1/models"):
        response = error_response(refusal, path)
        assert (response.status_code, json.loads(response.body), response.media_type) == (  # type: ignore[arg-type]
            status,
            answer,
            "application/json",
        )
    for path in ("/generate", "/", "/v1x"):
        response = error_response(refusal, path)
        assert (response.status_code, set(json.loads(response.body))) == (  # type: ignore[arg-type]
            refusal.status,
            {"error", "error_type"},
        )


def test_a_failed_generation_tells_openai_s_client_not_to_retry() -> None:
    assert (
        error_response(failed(Terminal("r", "error", 0)), "/v1/completions").headers["x-should-retry"]
        == "false"
    )


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_crash_is_500_in_each_api_family(
    broker: Broker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(broker.url) as (gateway, client):
        monkeypatch.setattr(gateway.pool.admission, "check", lambda: 1 / 0)
        response = await client.post(
            path, json={"inputs": "a", "messages": [{"role": "user", "content": "a"}]}
        )
        assert response.status_code == 500 and len(response.headers["x-request-id"]) == 32
        answer = {"error": "Internal error", "error_type": "internal"}
        openai = {"error": {"message": "Internal error", "type": "server_error", "param": None, "code": None}}
        assert response.json() == (openai if path.startswith("/v1") else answer)


async def test_models_and_health(broker: Broker) -> None:
    async with serving(broker.url, served_model_name="small") as (gateway, client):
        model = {"id": "small", "object": "model", "created": 0, "owned_by": "small"}
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [model]}
        for path in ("/health", "/ping", "/"):
            assert told(await client.get(path)) == (503, "healthcheck")
        async with working(broker.url, TOKENIZER, lambda _: Answer([1])):
            await ready(gateway)
            for path in ("/health", "/ping", "/"):
                health = await client.get(path)
                assert (health.status_code, health.content) == (200, b"")
                assert (await client.head(path)).status_code == 200
        assert "/generate_stream" in (await client.get("/api-doc/openapi.json")).json()["paths"]


@pytest.mark.parametrize("limits", [{"max_concurrent_requests": 1}, {"max_queued_bytes": 250}])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_full_queue_is_429_before_any_frame(
    broker: Broker, limits: dict[str, Any], path: str
) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
        serving(broker.url, **limits) as (gateway, client),
    ):
        await ready(gateway)
        await worker.pause()
        first = asyncio.create_task(stream(client, BODY))
        await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
        second = await client.post(path, json=BODY)
        assert (told(second), second.json()["error"]) == ((429, "overloaded"), "Model is overloaded")
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
        assert told(response) == (503, "unavailable") and "no worker is ready yet" in response.text


async def test_workers_are_read_again_before_a_503(broker: Broker) -> None:
    """Another gateway may have seen the worker first, and the client have been told that all is ready."""
    async with serving(broker.url, heartbeat_s=3600) as (_, client):
        assert (await client.post("/generate", json=BODY)).status_code == 503
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await wait_until(lambda: worker.redis.zcard(worker.keys.workers))
            await wait_until(lambda: answers(client))


async def test_503_after_the_last_worker_died(broker: Broker) -> None:
    """For worker_grace_s requests wait for the next one; then they are refused, and the limits of the dead
    are still known.
    """
    async with serving(broker.url, worker_grace_s=2.0) as (gateway, client):
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await ready(gateway)
            await worker.pause()
            waiting = asyncio.create_task(client.post("/generate", json=BODY))
            await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
            await worker.redis.delete(worker.keys.workers)
        await wait_until(lambda: gateway.pool.workers.ready_s + 2.0 < asyncio.get_running_loop().time())  # type: ignore[operator]
        response = await client.post("/generate", json=BODY)
        assert told(response) == (503, "unavailable") and "no worker for" in response.text
        assert gateway.pool.workers.max_total_tokens == 1024
        assert not waiting.done()
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])):
            assert (await waiting).status_code == 200
            await ready(gateway)


@pytest.fixture
def own_broker() -> Iterator[Broker]:
    with brokers.running() as broker:
        yield broker


async def test_503_names_the_broker_s_error(own_broker: Broker) -> None:
    """And nobody dies of it: as soon as it has passed, requests are served."""
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
                    and told(response) == (503, "unavailable")
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


async def test_503_while_the_broker_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, errors):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    with brokers.running() as broker:
        pid = redis.Redis.from_url(broker.url).info("server")["process_id"]  # type: ignore[index]
        async with (
            working(broker.url, TOKENIZER, lambda _: Answer([11])),
            serving(broker.url) as (gateway, client),
        ):
            await ready(gateway)
            os.kill(pid, signal.SIGSTOP)
            response = await client.post("/generate", json=BODY)
            assert told(response) == (503, "unavailable") and "did not answer in time" in response.text
            for path in ("/fleet", "/fleet/requests/r", "/v1/models", "/v1/models/other"):
                response = await client.get(path)
                assert response.status_code == 503 and "did not answer in time" in response.text
            os.kill(pid, signal.SIGCONT)
            await wait_until(lambda: not gateway.pool.relay.streams)
            assert (await client.post("/generate", json=BODY)).status_code == 200
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: gateway.pool.relay.last_error)
            response = await client.post("/generate", json=BODY)
            assert told(response) == (503, "unavailable") and "no connection to the broker" in response.text
            assert told(await client.get("/health")) == (503, "healthcheck")


async def answers(client: httpx.AsyncClient) -> bool:
    return (await client.post("/generate", json=BODY)).status_code == 200
