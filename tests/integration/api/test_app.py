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
from redis.asyncio import Redis

from api.admin.routes_fleet import ProcessList, judge_processes
from api.app import shared_listener
from api.requests import monitors
from api.requests.monitors import SILENT_S
from batcher.loop import Batcher
from batcher.process import serve
from common.settings.settings import SettingError, Settings
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_admin import Figures
from tests.support.answers import tgi_error
from tests.support.broker_state import KEYS
from tests.support.fleet.batchers import batcher, batching
from tests.support.fleet.gateways import answering, serving, start_process
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

BODY = {"inputs": "a"}


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


TWO = {"cors_allow_origin": ("http://a.example", "http://b.example")}
HOSTS = ("evil.example", "evil.example:3000", "127.0.0.1.evil.example", "localhost.evil.example")
ANY = {"cors_allow_origin": ("*",)}
MAY_CALL: list[tuple[dict[str, Any], list[dict[str, str]], str]] = [
    ({"api_key": "sesame"}, [{"origin": "http://a.example", "authorization": "Bearer sesame"}], "*"),
    ({}, [{"origin": origin} for origin in LOCAL], ""),
    (TWO, [{"origin": origin} for origin in TWO["cors_allow_origin"]], ""),
    (ANY, [{"origin": "http://c.example", "host": "d.example"}], "*"),
]
"""Settings, headers of pages, and which origin may read the answer, if it is not the page's alone."""
MAY_NOT: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    ({"demo": True}, [{"origin": origin} for origin in FOREIGN]),
    ({}, [{"host": host} | more for host in HOSTS for more in ({}, {"origin": f"http://{host}"})]),
    (TWO, [{"origin": "http://c.example"}, {"origin": "http://localhost:5173"}]),
]
"""A page whose host DNS binds here: its browser takes the page's origin for ours, and need not send it."""


@pytest.mark.parametrize(("settings", "pages", "shown"), MAY_CALL)
async def test_pages_of_these_origins_may_call(
    broker: Broker, settings: dict[str, Any], pages: list[dict[str, str]], shown: str
) -> None:
    async with serving(broker.url, **settings) as (_, client):
        for headers in pages:
            before = await client.options("/v1/chat/completions", headers=asking(headers["origin"]))
            assert before.status_code == 200
            assert "authorization" in before.headers["access-control-allow-headers"]
            answer = await client.post("/generate", content=b"{", headers=headers)
            assert answer.status_code == 415
            for one in (before, answer):
                assert one.headers["access-control-allow-origin"] == (shown or headers["origin"])
        own = str(client.base_url).rstrip("/")
        for origin in (own, own.replace("http:", "https:")) if not settings else ():  # a proxy may end TLS
            answer = await client.post("/generate", content=b"{", headers={"origin": origin})
            assert answer.status_code == 415


@pytest.mark.parametrize(("settings", "pages"), MAY_NOT)
async def test_pages_of_others_are_refused(
    broker: Broker, settings: dict[str, Any], pages: list[dict[str, str]]
) -> None:
    """So are requests that a page may send without asking first: its browser would only hide the answer."""
    async with serving(broker.url, **settings) as (_, client):
        for headers in pages:
            if "host" not in headers:
                assert (
                    await client.options("/generate", headers=asking(headers["origin"]))
                ).status_code == 400
            for method, path in GUARDED:
                sent = headers | {"content-type": "text/plain"}
                answer = await client.request(method, path, headers=sent)
                assert answer.status_code == 403, (headers, method, path)
                assert "access-control-allow-origin" not in answer.headers
                named = headers.get("host", repr(headers.get("origin")))
                assert named in answer.text and "CORS_ALLOW_ORIGIN" in answer.text
            assert "host" in headers or (await client.get("/health", headers=headers)).status_code != 403


async def test_this_host_is_known_by_its_names_and_a_browser_s_word_counts(broker: Broker) -> None:
    names = (
        "localhost",
        "LOCALHOST:3000",
        "127.0.0.1:1",
        "[::1]:3000",
        "192.168.0.7",
        "tokenfleet",
        "a.local",
    )
    async with serving(broker.url, cors_allow_origin=("https://evil.example",)) as (_, client):
        for host in (*names, "b.internal:80", socket.gethostname(), "evil.example"):
            assert (await client.get("/fleet", headers={"host": host})).status_code == 200, host
    async with serving(broker.url) as (_, client):
        for site, status in (("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)):
            answer = await client.get("/fleet", headers={"sec-fetch-site": site})
            assert answer.status_code == status, site


async def test_docs_load_nothing_from_other_hosts(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        page = (await client.get("/docs")).text
        assert "https://" not in page and "//cdn" not in page
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert (await client.get(path)).status_code == 200, path


async def status_code(client: httpx.AsyncClient) -> int:
    return (await client.get("/health")).status_code


async def is_healthy(client: httpx.AsyncClient) -> bool:
    return await status_code(client) == 200


async def is_unhealthy(client: httpx.AsyncClient) -> bool:
    return await status_code(client) == 503


async def batchers(client: httpx.AsyncClient) -> list[float]:
    """The gauge of batchers: active ones, and those that stand by."""
    figures = await Figures(client).read()
    return [figures[f'tokenfleet_batchers{{pool="default",state="{one}"}}'] for one in ("active", "standby")]


async def health(client: httpx.AsyncClient, *workers: FakeWorker) -> dict[str, str]:
    """Return what is said of the fleet right after a heartbeat of these workers."""
    for worker in workers:
        await worker.announce()
    found: dict[str, str] = (await client.get("/fleet")).json()["health"]
    return found


async def test_a_stopped_batcher_is_503_and_named_until_it_goes_on(broker: Broker) -> None:
    """It is not named before two leases are over: until then a standby may take over."""
    async with answering(broker.url, Answer([11]), heartbeat_s=0.5, num_workers=2) as (
        worker,
        gateway,
        client,
    ):
        refused = await client.get("/health")
        assert tgi_error(refused) == (503, "healthcheck") and "no batcher is active yet" in refused.text
        with batcher(broker.url, WORKER_TTL_S="60") as process:
            await wait_until(lambda: is_healthy(client))
            assert await batchers(client) == [1, 0]
            missing = {"state": "warn", "text": "1 of 2 workers ready"}  # `serve` says how many there are
            assert await health(client, worker) == missing
            os.kill(process.pid, signal.SIGSTOP)
            await wait_until(lambda: is_unhealthy(client))
            assert gateway.pool.batcher.gone_s >= SILENT_S
            refused = await client.get("/health")
            assert tgi_error(refused) == (503, "healthcheck")
            assert "no batcher is active: none has worked for" in refused.text
            assert (await batchers(client))[0] == 0
            found = await health(client)
            assert found["state"] == "bad" and "none has worked for" in found["text"]
            os.kill(process.pid, signal.SIGCONT)
            await wait_until(lambda: is_healthy(client))
            assert await batchers(client) == [1, 0]


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
        assert (await batchers(client))[0] == 0
        turns.set()
        await wait_until(lambda: is_healthy(client))
        os.kill(os.getpid(), signal.SIGTERM)
        await running


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


async def test_a_worker_that_the_batcher_refuses_is_none_that_is_ready(broker: Broker, redis: Redis) -> None:
    """It has another model: neither its limits nor its cache count."""
    async with (
        batching(broker.url),
        answering(broker.url, Answer([11])) as (one, gateway, client),
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as other,
    ):
        await wait_until(lambda: gateway.pool.workers.num_ready == 2)
        figures = await Figures(client).read()
        await redis.hset(KEYS.state, "refused", other.incarnation)  # type: ignore[misc]
        await wait_until(lambda: gateway.pool.workers.num_ready == 1)
        assert [ready.incarnation for ready in gateway.pool.workers.ready] == [one.incarnation]
        assert await health(client, one, other) == {"state": "warn", "text": "1 of 2 workers ready"}
        found = await Figures(client).read()
        assert found['tokenfleet_workers{pool="default",state="refused"}'] == 1
        most = "tgi_batch_max_total_tokens"
        assert found[most] == figures[most] / 2


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
