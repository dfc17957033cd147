"""Errors that are not about a request's parameters: each has the error object of its API family."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from api.errors import ApiError, conflict, failed, invalid, overloaded, unavailable
from api.http.error_handlers import error_response
from api.models import STARTED_S
from common.messages.events import Terminal, terminal_for
from deploy.launcher.embedded_broker import Broker
from tests.support.api_errors import openai_error, tgi_error
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER

BODY = {"inputs": "a"}


JSON = {"content-type": "application/json"}


async def test_unreadable_bodies_are_refused(broker: Broker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1000

    async with answering(broker.url, Answer([1]), payload_limit=5000) as (_, _, client):
        large = await client.post("/generate", content=b"x" * 5001, headers=JSON)
        assert tgi_error(large) == (413, "payload_too_large") and "5000 bytes" in large.text
        assert tgi_error(await client.post("/generate", content=endless(), headers=JSON)) == (
            413,
            "payload_too_large",
        )
        assert tgi_error(
            await client.post("/generate_stream", content=b"{}", headers={"content-type": "text/plain"})
        ) == (
            415,
            "unsupported_media_type",
        )
        assert tgi_error(await client.post("/generate", content=b"{}")) == (415, "unsupported_media_type")
        packed = await client.post("/generate", content=b"x", headers=JSON | {"content-encoding": "gzip"})
        assert tgi_error(packed) == (415, "unsupported_media_type") and "Encoding: gzip`" in packed.text
        odd = {"content-type": "Application/vnd.api+JSON; charset=utf-8", "content-encoding": "identity"}
        assert (await client.post("/generate", content=b'{"inputs":"a"}', headers=odd)).status_code == 200
        assert (
            await client.post(
                "/generate",
                content=b'{"inputs":"' + b"a" * 4900 + b'","parameters":{"truncate":5}}',
                headers=JSON,
            )
        ).status_code == 200


async def test_unknown_routes_are_404_and_unknown_methods_405(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        assert tgi_error(await client.get("/nothing")) == (404, "not_found")
        assert tgi_error(await client.get("/v11")) == (404, "not_found")
        wrong = await client.get("/generate")
        assert tgi_error(wrong) == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
        assert (await client.put("/")).headers["allow"] == "GET, HEAD, POST"
        for path in ("/v1", "/v1/nothing"):
            assert openai_error(await client.get(path)) == (404, "invalid_request_error", None)
        wrong = await client.get("/v1/completions")
        assert (
            openai_error(wrong) == (405, "invalid_request_error", None) and wrong.headers["allow"] == "POST"
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
    async with answering(broker.url, Answer([1]), payload_limit=100) as (_, _, client):
        cases = [
            (b"x" * 101, JSON, 413),
            (b"{}", {"content-type": "text/plain"}, 415),
            (b"{", JSON, 400),
            (b"[]", JSON, 400),
        ]
        for content, headers, status in cases:
            answer = await client.post(path, content=content, headers=headers)
            assert openai_error(answer) == (status, "invalid_request_error", None)


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
    (failed(Terminal("r", "error", 0, "two workers died")), 500, "server_error", "generation"),
    (failed(terminal_for("r", "timeout", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "expired", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "no_worker", 0)), 500, "server_error", "unavailable"),
    (failed(terminal_for("r", "client", 0)), 500, "server_error", "cancelled"),
    (failed(terminal_for("r", "grammar", 0)), 400, "invalid_request_error", "grammar"),
    (failed(terminal_for("r", "grammar_limit", 0)), 400, "invalid_request_error", "grammar"),
    (conflict("request"), 409, "invalid_request_error", "conflict"),
    (overloaded(), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (unavailable("no worker"), 503, "server_error", "unavailable"),
]


@pytest.mark.parametrize(("refusal", "status", "kind", "code"), REFUSALS)
def test_each_api_family_has_its_own_error_object(
    refusal: ApiError, status: int, kind: str, code: str | None
) -> None:
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
    for terminal in (Terminal("r", "error", 0), terminal_for("r", "timeout", 0)):
        response = error_response(failed(terminal), "/v1/completions")
        assert response.headers["x-should-retry"] == "false"


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
        assert response.headers["connection"] == "close"
        answer = {"error": "Internal error", "error_type": "internal"}
        openai = {"error": {"message": "Internal error", "type": "server_error", "param": None, "code": None}}
        assert response.json() == (openai if path.startswith("/v1") else answer)


async def test_health_is_503_until_a_worker_is_ready(broker: Broker) -> None:
    async with batching(broker.url), serving(broker.url, served_model_name="small") as (gateway, client):
        model = {"id": "small", "object": "model", "created": STARTED_S, "owned_by": "small"}
        for path in ("/v1/models", "/v1/models/"):
            assert (await client.get(path)).json() == {"object": "list", "data": [model], "models": []}
        for path in ("/health", "/ping", "/readyz", "/"):
            assert tgi_error(await client.get(path)) == (503, "healthcheck")
        async with working(broker.url, TOKENIZER, lambda _: Answer([1])):
            await ready(gateway)
            for path in ("/health", "/ping", "/readyz", "/"):
                health = await client.get(path)
                assert (health.status_code, health.content) == (200, b"")
                assert (await client.head(path)).status_code == 200
        assert "/generate_stream" in (await client.get("/api-doc/openapi.json")).json()["paths"]
