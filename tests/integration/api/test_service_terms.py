"""Class, tenant and deadline of a request: by headers on every route that generates, by fields on /v1."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from api.requests.service_terms import MAX_DEADLINE_MS
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER, ids

HEADERS = {"x-priority": "batch", "x-tenant": "acme", "x-deadline-ms": "5000"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "Hi"},
    "/generate": {"inputs": "Hi"},
    "/generate_stream": {"inputs": "Hi"},
    "/invocations": {"inputs": "Hi"},
    "/vertex": {"instances": [{"inputs": "Hi"}]},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 9},
}
TIMEOUT_S = 100


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    async with working(broker.url, TOKENIZER, lambda _: Answer(ids(" one"))) as worker:
        yield worker


@pytest.fixture
async def client(broker: Broker, worker: FakeWorker) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(broker.url, request_timeout_s=TIMEOUT_S) as (gateway, client):
        await ready(gateway)
        yield client


async def asked(
    client: httpx.AsyncClient, worker: FakeWorker, path: str, headers: dict[str, str], **fields: object
) -> Generate:
    """The request that a worker gets."""
    response = await client.post(path, json=ROUTES[path] | fields, headers=headers)
    assert response.status_code == 200, response.text
    return worker.seen[-1]


async def test_headers_count_on_every_route(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    for path in ROUTES:
        request = await asked(client, worker, path, HEADERS)
        assert (request.class_name, request.tenant, request.ttl_ms) == ("batch", "acme", 5000), path
        request = await asked(client, worker, path, {"x-deadline-ms": str(MAX_DEADLINE_MS)})
        assert (request.class_name, request.tenant, request.ttl_ms) == ("standard", "", TIMEOUT_S * 1000), (
            path
        )


async def test_fields_of_openai_and_vllm_count_and_headers_come_before_them(
    client: httpx.AsyncClient, worker: FakeWorker
) -> None:
    cases: list[tuple[dict[str, object], dict[str, str], str]] = [
        ({"service_tier": "flex"}, {}, "batch"),
        ({"service_tier": "auto"}, {}, "standard"),
        ({"service_tier": "priority"}, {}, "interactive"),
        ({"priority": -3}, {}, "interactive"),
        ({"priority": 0, "service_tier": "flex"}, {}, "standard"),
        ({"priority": 2}, {}, "batch"),
        ({"priority": "batch"}, {"x-priority": "-1"}, "interactive"),
    ]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        for fields, headers, expected in cases:
            assert (await asked(client, worker, path, headers, **fields)).class_name == expected, fields


async def test_a_response_says_its_tier(client: httpx.AsyncClient) -> None:
    for tier, shown in (("auto", "default"), ("flex", "flex"), ("scale", "priority")):
        response = await client.post("/v1/responses", json={"input": "Hi", "service_tier": tier})
        assert response.json()["service_tier"] == shown


async def test_a_tenant_is_known_by_its_key(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    tenants = [
        (await asked(client, worker, "/generate", {"authorization": f"Bearer {key}"})).tenant
        for key in ("one", "one", "two")
    ]
    assert tenants[0] == tenants[1] != tenants[2] and all(len(tenant) == 16 for tenant in tenants)


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({"x-priority": "urgent"}, {}, "x-priority"),
        ({"x-tenant": "a b"}, {}, "x-tenant"),
        ({"x-tenant": "a" * 65}, {}, "x-tenant"),
        ({"x-deadline-ms": "0"}, {}, "x-deadline-ms"),
        ({"x-deadline-ms": "1.5"}, {}, "x-deadline-ms"),
        ({"x-deadline-ms": str(MAX_DEADLINE_MS + 1)}, {}, "x-deadline-ms"),
        ({}, {"priority": "urgent"}, "priority"),
        ({}, {"service_tier": "gold"}, "service_tier"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    client: httpx.AsyncClient, headers: dict[str, str], fields: dict[str, object], named: str
) -> None:
    for path in ROUTES if headers else ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        response = await client.post(path, json=ROUTES[path] | fields, headers=headers)
        assert response.status_code == (400 if path.startswith("/v1/") else 422), path
        assert f"`{named}` must be" in response.text
