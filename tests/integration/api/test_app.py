"""What stands around every answer: the request's id, the key, and what browsers of other origins may."""

import asyncio
import logging
import re
import socket

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from api.event_loop import background_task
from common.process.logs import REQUEST_ID
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

BODY = {"inputs": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


# --- x-request-id -------------------------------------------------------------------------------------------


async def test_x_request_id_is_the_id_in_redis(broker: Broker) -> None:
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        for path, body in (("/generate", BODY), ("/generate_stream", BODY), ("/v1/chat/completions", CHAT)):
            response = await client.post(path, json=body)
            assert response.headers["x-request-id"] == worker.seen[-1].request_id
        assert len({request.request_id for request in worker.seen}) == 3


@pytest.mark.parametrize("brought", ["a", "req-7:!~", "x" * 128])
async def test_the_client_s_id_is_echoed_and_logged_with_ours(
    broker: Broker, brought: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "api.http.middleware")
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        response = await client.post("/generate", json=BODY, headers={"X-Request-ID": brought})
    assert response.headers["x-request-id"] == brought
    assert f"request {worker.seen[0].request_id}: its client calls it {brought}" in caplog.text


@pytest.mark.parametrize("brought", [b"", b"a b", b"x" * 129, "é".encode(), b"a\tb"])
async def test_ids_that_cannot_be_echoed_are_replaced(broker: Broker, brought: bytes) -> None:
    async with serving(broker.url) as (_, client):
        response = await client.get("/v1/models", headers={b"x-request-id": brought})
        assert len(response.headers["x-request-id"]) == 32 and response.headers["x-request-id"].isalnum()


async def test_every_response_has_a_request_id(broker: Broker) -> None:
    async with serving(broker.url, payload_limit=100, api_key=None) as (_, client):
        answers = [
            await client.get("/health"),
            await client.get("/nothing"),
            await client.get("/generate"),
            await client.post("/generate", json=BODY),
            await client.post("/generate", content=b"x" * 101, headers={"content-type": "application/json"}),
            await client.post("/v1/completions", content=b"{"),
            await client.options(
                "/generate", headers={"origin": "http://a", "access-control-request-method": "POST"}
            ),
        ]
    assert all(len(one.headers["x-request-id"]) == 32 for one in answers)
    assert len({one.headers["x-request-id"] for one in answers}) == len(answers)


async def test_a_background_task_has_no_request_id() -> None:
    seen: list[str] = []

    async def loop() -> None:
        seen.append(REQUEST_ID.get())
        await asyncio.Event().wait()

    REQUEST_ID.set("r")
    async with background_task(loop()):
        await wait_until(lambda: seen)
    assert seen == [""]


# --- the key ------------------------------------------------------------------------------------------------

KEYED = [
    "/generate",
    "/generate_stream",
    "/",
    "/tokenize",
    "/chat_tokenize",
    "/v1/chat/completions",
    "/v1/completions",
]


async def test_a_missing_key_is_401_in_each_api_family(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        for path in KEYED:
            for authorization in (
                None,
                "sesame",
                "Bearer",
                "Bearer sésame",
                "Bearer sesame2",
                "Basic sesame",
            ):
                headers = {} if authorization is None else {b"authorization": authorization.encode()}
                response = await client.post(path, content=b"", headers=headers)
                assert_refused(path, response)
            assert (
                await client.post(path, content=b"", headers={"authorization": "Bearer sesame"})
            ).status_code == 415


def assert_refused(path: str, response: httpx.Response) -> None:
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    answer = response.json()
    if path.startswith("/v1"):
        assert (answer["error"]["type"], answer["error"]["code"]) == (
            "authentication_error",
            "invalid_api_key",
        )
    else:
        assert answer["error_type"] == "unauthorized" and "Bearer" in answer["error"]


async def test_the_key_opens_all_routes_and_health_needs_none(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with batching(broker.url), answering(broker.url, one, api_key="sesame") as (_, _, client):
        for authorization in ("Bearer sesame", "bearer sesame", "BEARER  sesame"):
            assert (
                await client.post("/generate", json=BODY, headers={"authorization": authorization})
            ).status_code == 200
        for path in ("/health", "/ping", "/", "/metrics", "/docs", "/api-doc/openapi.json"):
            assert (await client.get(path)).status_code == 200
        url = f"{client.base_url}/v1"
        wrong, right = (AsyncOpenAI(base_url=url, api_key=key, max_retries=0) for key in ("wrong", "sesame"))
        with pytest.raises(AuthenticationError):
            await wrong.chat.completions.create(model="tgi", **CHAT)  # type: ignore[call-overload]
        assert (await right.chat.completions.create(model="tgi", **CHAT)).choices[0].message.content == "a"  # type: ignore[call-overload]


# --- other origins ------------------------------------------------------------------------------------------


def asking(origin: str) -> dict[str, str]:
    request_headers = "authorization,content-type"
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": request_headers,
    }


LOCAL = [
    "http://localhost",
    "http://localhost:5173",
    "https://127.0.0.1:8443",
    "http://[::1]:3001",
    "http://0.0.0.0:80",
    "vscode-webview://1a2b",
    "chrome-extension://abcdef",
]
FOREIGN = [
    "https://evil.example",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:80",
    "http://localhost:80.evil.example",
    "http://192.168.0.7:3000",
    "file://",
    "null",
    "",
]
GUARDED = [
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/invocations"),
    ("POST", "/vertex"),
    ("POST", "/tokenize"),
    ("POST", "/fleet/processes/b0-1/kill"),
    ("GET", "/fleet"),
    ("GET", "/requests/x/stream"),
    ("DELETE", "/requests/x"),
    ("POST", "/v1/messages"),
]
"""Requests that change something, or show what others do."""


async def test_with_a_key_pages_of_any_origin_may_call(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        before = await client.options("/v1/chat/completions", headers=asking("http://a.example"))
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "*")
        assert "authorization" in before.headers["access-control-allow-headers"]
        headers = {"origin": "http://a.example", "authorization": "Bearer sesame"}
        refused = await client.post("/generate", content=b"{", headers=headers)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (415, "*")


async def test_without_a_key_pages_of_this_machine_may_call(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        for origin in LOCAL:
            before = await client.options("/v1/chat/completions", headers=asking(origin))
            assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, origin)
            answer = await client.post("/generate", content=b"{", headers={"origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (415, origin)
        own = str(client.base_url).rstrip("/")
        for origin in (own, own.replace("http:", "https:")):  # as behind a proxy that ends TLS
            assert (
                await client.post("/generate", content=b"{", headers={"origin": origin})
            ).status_code == 415


async def test_without_a_key_pages_of_others_are_refused(broker: Broker) -> None:
    """So are requests that a page may send without asking first: its browser would only hide the answer."""
    async with serving(broker.url, demo=True) as (_, client):
        for origin in FOREIGN:
            assert (await client.options("/generate", headers=asking(origin))).status_code == 400
            headers = {"origin": origin, "content-type": "text/plain"}
            for method, path in GUARDED:
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 403, (origin, method, path)
                assert "access-control-allow-origin" not in answer.headers
                assert repr(origin) in answer.text and "CORS_ALLOW_ORIGIN" in answer.text
            assert (await client.get("/health", headers=headers)).status_code != 403
        for site, status in (("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)):
            answer = await client.get("/fleet", headers={"sec-fetch-site": site})
            assert answer.status_code == status, site


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:3000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
async def test_a_page_whose_host_is_bound_here_by_dns_is_refused(broker: Broker, host: str) -> None:
    """Its browser takes the page's origin for ours, and need not send it (DNS rebinding)."""
    async with serving(broker.url) as (_, client):
        for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
            for method, path in GUARDED:
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path)
                assert host in answer.text
        for known in (
            "localhost",
            "LOCALHOST:3000",
            "127.0.0.1:1",
            "[::1]:3000",
            "192.168.0.7",
            "tokenfleet",
            "a.local",
            "b.internal:80",
            socket.gethostname(),
        ):
            assert (await client.get("/fleet", headers={"host": known})).status_code == 200, known
    async with serving(broker.url, cors_allow_origin=(f"https://{host}",)) as (_, client):
        assert (await client.get("/fleet", headers={"host": host})).status_code == 200


async def test_pages_of_configured_origins_may_call_and_no_others(broker: Broker) -> None:
    async with serving(broker.url, cors_allow_origin=("http://a.example", "http://b.example")) as (_, client):
        for origin, allowed in (
            ("http://a.example", True),
            ("http://b.example", True),
            ("http://c.example", False),
            ("http://localhost:5173", False),
        ):
            answer = await client.get("/v1/models", headers={"origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            assert (await client.options("/generate", headers=asking(origin))).is_success is allowed
            answer = await client.post("/generate", content=b"{", headers={"origin": origin})
            assert answer.status_code == (415 if allowed else 403)
    async with serving(broker.url, cors_allow_origin=("*",)) as (_, client):
        headers = {"origin": "http://c.example", "host": "d.example"}
        answer = await client.post("/generate", content=b"{", headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (415, "*")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", None]
)
async def test_bodies_that_a_page_may_send_without_asking_first_are_no_requests(
    broker: Broker, kind: str | None
) -> None:
    async with serving(broker.url, cors_allow_origin=("*",)) as (_, client):
        for method, path in GUARDED[:3] + GUARDED[5:8] + GUARDED[-1:]:
            answer = await client.request(
                method, path, content=b"{}", headers={"content-type": kind} if kind else {}
            )
            assert answer.status_code == 415, path


async def test_docs_load_nothing_from_other_hosts(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        page = (await client.get("/docs")).text
        assert "https://" not in page and "//cdn" not in page
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert (await client.get(path)).status_code == 200, path
