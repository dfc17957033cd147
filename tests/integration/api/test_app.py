"""What stands around every answer: the request's id, the key, what browsers of other origins may; the health
of the fleet while processes stop or hang; and the ends of gateways.
"""

import asyncio
import logging
import os
import re
import signal
import socket
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError
from redis.asyncio import Redis

from api.admin.routes_fleet import ProcessList, judge_processes
from api.app import shared_listener
from api.requests import monitors
from api.requests.monitors import SILENT_S
from batcher.loop import Batcher
from batcher.process import serve
from common.broker.keys import Keys
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import tgi_error
from tests.support.fleet.batchers import batcher, batching
from tests.support.fleet.gateways import answering, serving, start_process
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

BODY = {"inputs": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


# --- x-request-id -------------------------------------------------------------------------------------------


async def test_the_client_s_id_is_echoed_and_logged_with_ours(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be echoed is replaced."""
    caplog.set_level(logging.INFO, "api.http.middleware")
    async with answering(broker.url, Answer([11])) as (worker, _, client):
        for brought in ("a", "req-7:!~", "x" * 128):
            response = await client.post("/generate", json=BODY, headers={"X-Request-ID": brought})
            assert response.headers["x-request-id"] == brought
            assert f"request {worker.seen[-1].request_id}: its client calls it {brought}" in caplog.text
        for wrong in (b"", b"a b", b"x" * 129, "é".encode(), b"a\tb"):
            response = await client.get("/v1/models", headers={b"x-request-id": wrong})
            assert len(response.headers["x-request-id"]) == 32 and response.headers["x-request-id"].isalnum()


# --- the key ------------------------------------------------------------------------------------------------


async def test_the_key_opens_all_routes_and_health_needs_none(broker: Broker) -> None:
    one = Answer(ids("a"))
    async with batching(broker.url), answering(broker.url, one, api_key="sesame") as (_, _, client):
        for authorization in ("Bearer sesame", "bearer sesame", "BEARER  sesame"):
            assert (
                await client.post("/generate", json=BODY, headers={"authorization": authorization})
            ).status_code == 200
        for path in (
            *("/health", "/ping", "/", "/metrics", "/docs", "/api-doc/openapi.json"),
            *("/v2", "/v2/health/live", "/v2/models/tgi"),
        ):
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


async def test_a_page_whose_host_is_bound_here_by_dns_is_refused(broker: Broker) -> None:
    """Its browser takes the page's origin for ours, and need not send it (DNS rebinding)."""
    host = "evil.example"
    async with serving(broker.url) as (_, client):
        for wrong in (host, f"{host}:3000", f"127.0.0.1.{host}", f"localhost.{host}"):
            for headers in ({"host": wrong}, {"host": wrong, "origin": f"http://{wrong}"}):
                for method, path in GUARDED:
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 403, (method, path)
                    assert wrong in answer.text
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


async def test_bodies_that_a_page_may_send_without_asking_first_are_no_requests(broker: Broker) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a")
    async with serving(broker.url, cors_allow_origin=("*",)) as (_, client):
        for kind in kinds:
            for method, path in GUARDED[:3] + GUARDED[5:8] + GUARDED[-1:]:
                headers = {"content-type": kind}
                answer = await client.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code == 415, path


async def test_docs_load_nothing_from_other_hosts(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        page = (await client.get("/docs")).text
        assert "https://" not in page and "//cdn" not in page
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert (await client.get(path)).status_code == 200, path


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


def test_a_taken_port_is_one_error_line_and_ex_config(broker: Broker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start_process(broker.url, "g0", taken.getsockname()[1])
        error = process.communicate(timeout=60)[1]
    assert process.returncode == os.EX_CONFIG
    assert "PORT: cannot listen on 127.0.0.1:" in error and len(error.splitlines()) == 1


def test_gateways_listen_on_listen_host_or_name_the_error() -> None:
    for host in ("0.0.0.0", "127.0.0.1", "::1"):
        with shared_listener(host, 0) as one:
            assert one.getsockname()[0] == host
    with pytest.raises(SettingError, match=r"PORT: cannot listen on 192\.0\.2\.1:"):
        shared_listener("192.0.2.1", 0)
