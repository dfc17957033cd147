"""What operators ask a gateway: GET /fleet and its kill button, the page, /metrics, and /usage with
budgets, where what is counted is what answers say; and the access log, a line for each request with what
became of it, and nothing of what it said.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import quote

import httpx
import pytest
import redis
from redis.asyncio import Redis

from api.errors import internal_error
from api.http import middleware
from common.api_keys import IssuedKey
from common.broker.heartbeat import Heartbeat, process_fields
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Timeline, TimelineEvent
from common.messages.request import Generate
from common.process.logs import TextFormatter
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.answers import tgi_frames
from tests.support.broker_state import KEYS
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, nothing_left, ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import CHAT, Service
from tests.support.keys.issued import add_key, bearer, known
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import PATIENCE_S, wait_for, wait_until

DEMO: dict[str, Any] = {"demo": True, "hostname": "127.0.0.1"}


@contextlib.contextmanager
def bystander(title: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process, as the gateway of `serving` calls it a sibling, that looks like one of the
    fleet.
    """
    code = (
        f"import setproctitle, time; setproctitle.setproctitle({title!r}); print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the launcher of the gateway that it serves itself, in a narrow terminal."""
    monkeypatch.setattr("api.admin.routes_fleet.os.getppid", os.getpid)
    monkeypatch.setenv("COLUMNS", "20")


async def show(redis: Any, name: str, **figures: Any) -> None:
    await Heartbeat(PoolClient(redis, KEYS), "batcher", name, 60.0).send(**figures)


async def test_live_processes_are_listed(broker: Broker, redis: Any) -> None:
    async with answering(broker.url, Answer([])) as (worker, _, client):
        await show(redis, "b0-1", waiting=4, rows=2)
        await show(redis, "b1-1", waiting=0, rows=0)
        await redis.set(KEYS.batcher, "b0-1")
        fleet = (await client.get("/fleet")).json()
        by_id = {one["id"]: one for one in fleet["processes"]}
        assert set(by_id) == {worker.incarnation, "g0-test", "b0-1", "b1-1", "broker"}
        assert {name: fleet[name] for name in ("pool", "model", "demo")} == {
            "pool": "default",
            "model": "smollm2",
            "demo": False,
        }
        assert fleet["requests"] == {"live": 0, "waiting": 4, "running": 2, "limit": 1024}
        one = by_id[worker.incarnation]
        assert (one["kind"], one["state"], one["num_blocks"], one["dtype"], one["rows"]) == (
            "worker",
            "ready",
            64,
            "float32",
            0,
        )
        assert (by_id["b0-1"]["state"], by_id["b1-1"]["state"], by_id["b1-1"]["active"]) == (
            "active",
            "standby",
            False,
        )
        own = process_fields()
        assert {name: by_id["g0-test"][name] for name in ("pid", "host")} == {
            name: own[name] for name in ("pid", "host")
        }
        assert all(0 <= one["age_s"] < PATIENCE_S for one in fleet["processes"])
        figures = await Figures(client).read()
        standing = ["active", "standby"]
        assert [figures[f'tokenfleet_batchers{{pool="default",state="{one}"}}'] for one in standing] == [1, 1]


async def test_the_kill_button_kills_a_process_of_the_same_launcher(
    broker: Broker, redis: Any, sibling: Any
) -> None:
    with bystander("tokenfleet batcher b0") as process:
        async with serving(broker.url, **DEMO) as (_, client):
            await show(redis, "b0-1", pid=process.pid)
            assert (await client.get("/fleet")).json()["demo"] is True
            answer = await client.post(
                "/fleet/processes/b0-1/kill", headers={"origin": str(client.base_url).rstrip("/")}
            )
            assert (answer.status_code, answer.json()) == (202, {"killed": "b0-1"})
            assert await asyncio.to_thread(process.wait, 10) == -9


async def refused(client: Any, name: str = "b0-1", **headers: str) -> tuple[int, str]:
    answer = await client.post(f"/fleet/processes/{name}/kill", headers=headers)
    return answer.status_code, answer.json()["error"]


async def test_the_kill_button_kills_no_other_process(
    broker: Broker, redis: Any, sibling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        bystander("tokenfleet batcher b0") as process,
        bystander("somebody's editor") as other,
        bystander("tokenfleet worker w0") as worker,
    ):
        async with serving(broker.url) as (_, client):
            await show(redis, "b0-1", pid=process.pid)
            assert await refused(client) == (403, "Not killed: DEMO is not on")
        async with serving(broker.url, **DEMO) as (_, client):
            assert (await refused(client, "b7-1"))[0] == 404
            assert (await refused(client, origin="http://evil.example"))[0] == 403
        async with serving(broker.url, **DEMO, cors_allow_origin=("*",)) as (_, client):
            assert (
                "origin 'http://evil.example' is not ours"
                in (await refused(client, origin="http://evil.example"))[1]
            )
            assert (await refused(client, origin="null"))[0] == 403
            assert (
                "'evil.example:80' is not a loopback"
                in (await refused(client, host="evil.example:80", origin="http://evil.example:80"))[1]
            )
            await show(redis, "b0-1", pid=process.pid, host="elsewhere")
            assert await refused(client) == (403, "Not killed: it runs on elsewhere")
            for pid in (other.pid, worker.pid):  # of no process of ours, of one that is no batcher
                await show(redis, "b0-1", pid=pid)
                assert await refused(client) == (403, f"Not killed: process {pid} is not one of this fleet")
            await show(redis, "b0-1", pid=2**22 + 1)
            assert (await refused(client))[0] == 404
            monkeypatch.setattr("api.admin.routes_fleet.os.getppid", lambda: 1)
            await show(redis, "b0-1", pid=process.pid)
            assert await refused(client) == (
                403,
                f"Not killed: process {process.pid} is not one of this fleet",
            )
        assert process.poll() is None and other.poll() is None and worker.poll() is None


async def test_browsers_get_the_page_and_other_clients_the_health(broker: Broker) -> None:
    async with batching(broker.url), answering(broker.url, Answer([])) as (_, _, client):
        page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (
            page.headers["content-type"] == "text/html; charset=utf-8"
            and "<title>Tokenfleet</title>" in page.text
        )
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/")).content == b"", "TGI's health has no body"
        for name, kind in {
            "page.js": "text/javascript",
            "styles/base.css": "text/css",
            "icon.svg": "image/svg+xml",
        }.items():
            assert (await client.get(f"/page/{name}")).headers["content-type"].startswith(kind)
        access = {"status": 200, "has_keys": False}
        assert (await client.get("/page/access")).json() == access
        hidden = (await client.get("/page/access", headers={"x-fleet-hidden": "1"})).json()
        assert (hidden["status"], "proxy" in hidden["text"]) == (404, True)
        for name in ("nothing.js", "..%2froll.py", "%2e%2e/roll.py"):
            assert (await client.get(f"/page/{name}")).status_code == 404


# --- lives of requests --------------------------------------------------------------------------------------


async def test_the_timeline_of_a_job_with_any_id(broker: Broker) -> None:
    async with serving(broker.url) as (gateway, client):
        life = encode(Timeline([TimelineEvent(5, "queued", num_tokens=3)]))
        lives: dict[Any, Any] = {f"team/{name}": life for name in ("a=1+2#0", "a=1+2.1", "a=1+20", "b")}
        await gateway.pool.client.redis.xadd(KEYS.timeline, lives)
        found = await client.get(f"/fleet/requests/{quote('team/a=1+2', safe='')}")
        assert list(found.json()["timelines"]) == ["team/a=1+2#0", "team/a=1+2.1"]
        assert (await client.get("/fleet/requests/team")).status_code == 404


IDS = ids(" the sea is so blue")
FAILING = {13: "forward", 14: "grammar", 15: "picture", 16: "no_worker", 17: "expired"}
"""`max_new_tokens` → why a worker fails the request."""


def scripted(request: Generate) -> Answer:
    return Answer(IDS, error=FAILING.get(request.stopping.max_new_tokens, ""))


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "The sky", "parameters": parameters}


class Figures:
    """Values of /metrics at the start; a call returns what has been added to a series since."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.before: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = [line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def begin(self) -> "Figures":
        self.before = await self.read()
        return self

    async def added(self, name: str) -> float:
        return (await self.read())[name] - self.before.get(name, 0.0)

    async def until(self, name: str, value: float) -> None:

        await wait_for(lambda: self.added(name), value)


async def test_counts_durations_and_lengths_of_requests(broker: Broker) -> None:
    async with answering(broker.url, scripted, step_s=0.02) as (_, _, client):
        figures = await Figures(client).begin()
        assert (await client.post("/generate_stream", json=body())).status_code == 200
        assert (await client.post("/generate", json=body(max_new_tokens=3))).status_code == 200
        await figures.until("tgi_request_success", 2)
        await figures.until("tgi_request_count", 2)
        for name in (
            "request",
            "request_validation",
            "request_queue",
            "request_inference",
            "request_mean_time_per_token",
        ):
            await figures.until(f"tgi_{name}_duration_count", 2)
        await figures.until("tgi_request_generated_tokens_sum", len(IDS) + 1 + 3)
        await figures.until("tgi_request_input_length_sum", 2 * len(ids("The sky")))
        assert 0.02 * len(IDS) <= await figures.added("tgi_request_duration_sum") <= 20
        ours = 'class="standard",pool="default"'
        await figures.until(f"tokenfleet_time_to_first_token_seconds_count{{{ours}}}", 2)
        await figures.until(f"tokenfleet_inter_token_latency_seconds_count{{{ours}}}", len(IDS) + 2)
        await figures.until(f'tokenfleet_requests_total{{{ours},reason="length"}}', 1)


async def test_an_answer_that_is_read_again_is_counted_once(broker: Broker) -> None:
    async with answering(broker.url, scripted, step_s=0.02) as (_, _, client):
        figures = await Figures(client).begin()
        async with client.stream("POST", "/generate_stream", json=body() | {"resume_s": 60}) as first:
            place = first.headers["content-location"]
            frames = first.aiter_lines()
            await anext(frames)
            assert (await client.get(place)).status_code == 200  # the first reader is superseded
            assert "another connection" in "".join([line async for line in frames])
        for path in (place, place, place.removesuffix("/stream")):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/generate", json=body(max_new_tokens=3))).status_code == 200
        ours = 'class="standard",pool="default"'
        await figures.until("tgi_request_success", 2)
        await figures.until("tgi_request_generated_tokens_sum", len(IDS) + 1 + 3)
        await figures.until(f"tokenfleet_time_to_first_token_seconds_count{{{ours}}}", 2)
        assert await figures.added(f"tokenfleet_inter_token_latency_seconds_count{{{ours}}}") <= len(IDS) + 2
        assert await figures.added('tgi_request_failure{err="generation"}') == 0


async def test_failures_are_counted_by_cause(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(broker.url, scripted, max_concurrent_requests=1) as (worker, gateway, client):
        figures = await Figures(client).begin()
        assert (await client.post("/generate", json={"inputs": ""})).status_code == 422
        assert (await client.post("/v1/completions", json={"prompt": 5.5})).status_code == 400
        assert (await client.post("/generate", json=body(max_new_tokens=13))).status_code == 424
        assert (await client.post("/fleet/processes/x/kill")).status_code == 403
        await is_gone(client, worker)
        await is_gone(client, worker, "/generate_stream", resume_s=0.1)
        await figures.until('tgi_request_failure{err="dropped"}', 2)
        await overload(client, worker)
        await figures.until('tgi_request_failure{err="overloaded"}', 1)
        await figures.until('tgi_request_failure{err="validation"}', 2)
        await figures.until('tgi_request_failure{err="generation"}', 1)
        await figures.until("tgi_request_count", 7)
        crashes = AsyncMock(side_effect=(ZeroDivisionError(), internal_error()))
        monkeypatch.setattr(gateway.pool, "check_admission", crashes)
        for _ in range(2):
            assert (await client.post("/generate", json=body())).status_code == 500
        await figures.until('tgi_request_failure{err="generation"}', 3)


async def test_failures_after_the_admission_are_counted_by_cause(broker: Broker) -> None:
    async with answering(broker.url, scripted) as (_, _, client):
        figures = await Figures(client).begin()
        for number, status in zip(FAILING, (424, 422, 424, 424, 408), strict=True):
            assert (await client.post("/generate", json=body(max_new_tokens=number))).status_code == status
        await figures.until('tgi_request_failure{err="validation"}', 2)
        for cause in ("generation", "unavailable", "timeout"):
            await figures.until(f'tgi_request_failure{{err="{cause}"}}', 1)


async def is_gone(
    client: httpx.AsyncClient, worker: FakeWorker, path: str = "/generate", **fields: Any
) -> None:
    """Send a request, and disconnect before its answer comes."""
    await worker.pause()
    posting = asyncio.create_task(client.post(path, json=body() | fields))
    await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
    num_before = await worker.redis.xlen(worker.keys.control)
    posting.cancel()
    await asyncio.wait([posting])
    await wait_until(lambda: is_longer(worker, num_before))
    worker.going.set()
    await wait_for(lambda: worker.redis.xlen(worker.keys.requests), 0)


async def is_longer(worker: FakeWorker, num_before: int) -> bool:
    """Whether a cancel has come."""
    length: int = await worker.redis.xlen(worker.keys.control)
    return length > num_before


async def overload(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    """Send one request more than may be live."""
    await worker.pause()
    async with client.stream("POST", "/generate_stream", json=body()) as first:
        assert (await client.post("/generate", json=body())).status_code == 429
        worker.going.set()
        await first.aread()


async def test_gauges_of_queue_and_workers(broker: Broker) -> None:
    async with answering(broker.url, scripted) as (worker, _, client):
        await worker.pause()
        async with client.stream("POST", "/generate_stream", json=body()):
            found = await Figures(client).read()
            assert found['tokenfleet_workers{pool="default",state="ready"}'] == 1
            assert found["tgi_queue_size"] == found['tokenfleet_live_requests{pool="default"}'] == 1
            assert found["tgi_batch_max_total_tokens"] == 64 * 16
            assert found['tokenfleet_kv_cache_usage_ratio{pool="default"}'] == 0
            assert found['tokenfleet_broker_up{pool="default"}'] == 1
            worker.going.set()
        await worker.announce("draining")
        assert (await Figures(client).read())['tokenfleet_workers{pool="default",state="draining"}'] == 1


async def test_without_a_broker_only_broker_up_is_reported() -> None:
    with brokers.running() as own:
        async with serving(own.url) as (_, client):
            assert (await Figures(client).read())['tokenfleet_broker_up{pool="default"}'] == 1
            shut(own)
            found = await Figures(client).read()
            assert found == {'tokenfleet_broker_up{pool="default"}': 0}


def shut(own: Broker) -> None:
    with redis.Redis.from_url(own.url) as client:
        client.shutdown(nosave=True)


FIELDS: dict[str, dict[str, Any]] = {
    "full": {"tenant": "acme"},
    "poor": {"tenant": "guest", "budget_tokens": 12},
    "brief": {"tenant": "guest", "budget_tokens": 7},
    "terse": {"tenant": "guest", "budget_tokens": 34},
    "admin": {"tenant": "acme", "admin": True},
}
"""API keys by the names that the tests give them."""


@dataclass(frozen=True)
class Clients:
    """A client of a gateway, and its keys."""

    http: httpx.AsyncClient
    keys: dict[str, IssuedKey]

    def key_id(self, name: str) -> str:
        return self.keys[name].record.key_id

    async def ask(self, name: str = "admin", **fields: Any) -> httpx.Response:
        body = {"prompt": "one two three four five", "max_tokens": 3} | fields
        return await self.http.post("/v1/completions", json=body, headers=bearer(self.keys[name]))

    async def get(self, path: str, name: str = "admin", **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=bearer(self.keys[name]) | headers)

    async def report(self, name: str = "admin", **params: Any) -> dict[str, Any]:
        response = await self.get(f"/usage?{httpx.QueryParams(params)}", name)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@pytest.fixture
async def clients(broker: Broker, redis: Redis) -> AsyncIterator[Clients]:
    keys = {name: await add_key(redis, name=name, **fields) for name, fields in FIELDS.items()}
    answer = Answer(ids(" one two three"), num_cached=2)
    async with (
        working(broker.url, TOKENIZER, lambda _: answer),
        serving(broker.url, served_model_name=("m",)) as (gateway, client),
    ):
        await ready(gateway)
        for key in keys.values():
            await known([gateway], key)
        yield Clients(client, keys)


async def test_what_is_counted_is_what_answers_say(clients: Clients) -> None:
    """A prompt of several choices counts once, two prompts of one request twice."""
    used = [
        (await clients.ask(**fields)).json()["usage"]
        for fields in ({}, {"n": 3}, {"prompt": ["one two", "three four"], "n": 2}, {"stream": False})
    ]
    total = (await clients.report())["total"]
    assert total["requests"] == 5, "prompts"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert total[name] == sum(one[name] for one in used)
    assert total["cached_tokens"] == sum(one["prompt_tokens_details"]["cached_tokens"] for one in used)
    lines = (await clients.get("/metrics")).text.splitlines()
    labels = 'model="m",pool="default",tenant="acme"'
    for kind in ("prompt", "completion"):
        assert f'tokenfleet_used_tokens_total{{kind="{kind}",{labels}}} {total[f"{kind}_tokens"]}.0' in lines


async def test_a_client_that_hangs_up_or_asks_for_no_usage_is_counted(clients: Clients) -> None:
    body, headers = {"prompt": "one", "stream": True}, bearer(clients.keys["full"])
    async with clients.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        await anext(response.aiter_lines())

    async def is_counted() -> bool:
        return bool((await clients.report())["total"]["requests"] == 1)

    await wait_until(is_counted)


async def test_usage_is_grouped_and_filtered(clients: Clients) -> None:
    await clients.ask("full")
    await clients.ask("full")
    await clients.ask("admin")
    groups = (await clients.report(group_by="key,month"))["data"]
    requests = {clients.key_id("full"): 2, clients.key_id("admin"): 1}
    assert [(one["key"], one["requests"]) for one in groups] == sorted(requests.items())
    assert list(groups[0])[:3] == ["month", "key", "requests"]
    [hour] = (await clients.report(group_by="hour", tenant="acme"))["data"]
    assert hour["requests"] == 3 and hour["hour"].endswith(":00:00Z")
    assert (await clients.report(model="other"))["data"] == []
    assert (await clients.report(key=clients.key_id("admin")))["total"]["requests"] == 1


async def test_a_tenant_sees_its_own_usage(clients: Clients) -> None:
    await clients.ask("full")
    await clients.ask("poor")
    assert [one["tenant"] for one in (await clients.report("poor"))["data"]] == ["guest"]
    assert {one["tenant"] for one in (await clients.report("admin"))["data"]} == {"acme", "guest"}
    refused = await clients.get("/usage?tenant=acme", "poor")
    assert refused.status_code == 422 and "`tenant` must be 'guest'" in refused.text


async def test_what_cannot_be_reported_is_refused(clients: Clients) -> None:
    wrong = [
        ({"from": "yesterday"}, "`from`: Input should be a valid datetime"),
        ({"to": ""}, "`to`: Input should be a valid datetime"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "`to` must not be before `from`"),
        ({"from": "2020-01-02"}, "`from` must be within 90 days"),
        ({"group_by": "key,owner"}, "`group_by`: String should match"),
        ({"format": "csv"}, "`format`: Input should be 'json'"),
    ]
    for params, words in wrong:
        response = await clients.get(f"/usage?{httpx.QueryParams(params)}")
        assert response.status_code == 422 and words in response.text


async def test_a_key_at_its_budget_is_refused_until_the_next_month(clients: Clients) -> None:
    """A budget of 12 tokens has room for one prompt of 5 with an answer of 3, and for no second one."""
    assert (await clients.ask("poor")).status_code == 200
    refused = await clients.ask("poor")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, *["insufficient_quota"] * 2)
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
    long = await clients.ask("poor", prompt="one " * 20)
    assert (long.status_code, "retry-after" in long.headers) == (429, False)
    assert "12 tokens are fewer than a prompt of 21 needs" in long.json()["error"]["message"]
    assert (await clients.ask("full")).status_code == 200


async def test_an_answer_that_reaches_the_budget_ends_as_one_that_is_cut(clients: Clients) -> None:
    """TGI's last frame has the last token and the text, and Anthropic's clients see no stop string."""
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("brief", "/generate_stream", {"inputs": "one two three four five", "parameters": {"details": True}}),
        ("terse", "/v1/messages", CHAT | {"max_tokens": 90}),
    ]
    stream, message = [
        await clients.http.post(path, json=body, headers=bearer(clients.keys[name]))
        for name, path, body in asked
    ]
    last, whole = tgi_frames(stream.content)[-1], message.json()
    assert (last["generated_text"], last["details"]["finish_reason"]) == (" one two", "length")
    assert [block["text"] for block in whole["content"]] == [" one two"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)


# --- access log ---------------------------------------------------------------------------------------------

SECRET = "The sky over Zanzibar"


def told(**parameters: Any) -> dict[str, Any]:
    return {"inputs": SECRET, "parameters": parameters}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> "Lines":
    caplog.set_level("INFO")
    return Lines(caplog)


class Lines:
    """Lines of the access log so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    @property
    def records(self) -> list[Any]:
        return [one for one in self.caplog.records if one.name == "api.http.access_log"]

    @property
    def fields(self) -> list[dict[str, Any]]:
        return [one.fields for one in self.records if hasattr(one, "fields")]

    @property
    def texts(self) -> list[str]:
        return [TextFormatter("g0").format(one) for one in self.records]

    async def one(self) -> dict[str, Any]:
        await wait_until(lambda: self.fields)
        [found] = self.fields
        return found


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_an_answer_has_one_line_with_tokens_times_and_the_reason(
    broker: Broker, lines: Lines, path: str
) -> None:
    async with answering(broker.url, scripted) as (worker, _, client):
        response = await client.post(
            f"{path}?x=%5Bsecret%5D", json=told(max_new_tokens=3), headers={"x-tenant": "alice"}
        )
        found = await lines.one()
    assert found["request_id"] == response.headers["x-request-id"] == worker.seen[0].request_id
    assert (found["method"], found["route"], found["status"], found["reason"]) == (
        "POST",
        path,
        200,
        "length",
    )
    assert (found["model"], found["tenant"], found["class"]) == ("smollm2", "alice", "standard")
    assert (found["prompt_tokens"], found["cached_tokens"], found["completion_tokens"]) == (
        worker.seen[0].num_prompt,
        0,
        3,
    )
    assert 0 <= found["queue_s"] <= found["total_s"] and 0 < found["first_token_s"] <= found["total_s"]
    assert found["client"] == "127.0.0.1"
    [line] = lines.texts
    assert f" I g0 access method=POST route={path} status=200 request_id=" in line
    assert " reason=length total_s=" in line
    assert "Zanzibar" not in line and "secret" not in line
    assert " blue" not in line and " sea" not in line


async def test_equal_prompts_of_a_request_all_count_in_its_line(broker: Broker, lines: Lines) -> None:
    asked = {"prompt": ["Hi", "Hi"], "n": 2, "max_tokens": 3}
    async with answering(broker.url, scripted) as (_, _, client):
        used = (await client.post("/v1/completions", json=asked)).json()["usage"]
        found = await lines.one()
    assert (found["prompt_tokens"], found["choices"]) == (used["prompt_tokens"], 4)


@pytest.mark.parametrize(
    ("path", "sent", "headers", "status", "route", "reason"),
    [
        ("/generate", {"inputs": SECRET, "parameters": {"top_p": 7}}, {}, 422, "/generate", "validation"),
        ("/generate", told(), {"authorization": "Bearer wrong"}, 401, "/generate", "unauthorized"),
        ('/no%0Asuch"path', told(), {}, 404, '/no\nsuch"path', "not_found"),
        ("/generate", told(max_new_tokens=13), {}, 424, "/generate", "generation"),
    ],
)
async def test_a_refusal_has_a_line_with_its_reason(
    broker: Broker,
    lines: Lines,
    path: str,
    sent: dict[str, Any],
    headers: dict[str, str],
    status: int,
    route: str,
    reason: str,
) -> None:
    async with answering(broker.url, scripted, api_key="right") as (_, _, client):
        await client.post(path, json=sent, headers={"authorization": "Bearer right"} | headers)
        found = await lines.one()
    assert (found["status"], found["route"], found["reason"]) == (status, route, reason)
    [line] = lines.texts
    assert "Zanzibar" not in line and "wrong" not in line and len(line.splitlines()) == 1
    assert ("error" in found) == (status == 424)


async def test_a_client_that_leaves_has_a_line_that_says_so(broker: Broker, lines: Lines) -> None:
    async with answering(broker.url, Answer(IDS, ends=False)) as (worker, gateway, client):
        async with client.stream("POST", "/generate_stream", json=told()) as response:
            async for _ in response.aiter_raw():
                break
        await nothing_left(gateway, worker)
        found = await lines.one()
    assert (found["status"], found["reason"]) == (200, "cancelled") and found["completion_tokens"] > 0


async def test_probes_metrics_and_the_page_have_no_line(broker: Broker, lines: Lines) -> None:
    """Whoever waits for a fleet asks ten times a second."""
    async with answering(broker.url, scripted) as (_, _, client):
        for path in (*middleware.POLLED, "/page/page.js"):
            assert (await client.get(path)).status_code in (200, 503)
        await client.get("/v1/models")
        assert (await lines.one())["route"] == "/v1/models"


async def test_a_job_has_a_line(broker: Broker, lines: Lines) -> None:
    async with answering(broker.url, scripted) as (worker, _, _):
        await Service(worker.redis).submit(id="j1", inputs=SECRET, parameters={"max_new_tokens": 3})
        found = await lines.one()
    assert (found["method"], found["route"], found["status"]) == ("job", "submit", 200)
    assert (found["request_id"], found["reason"]) == ("j1", "length")


async def test_lines_beyond_the_rate_are_counted_in_one(broker: Broker, lines: Lines) -> None:
    async with answering(broker.url, scripted, access_log_rate=2) as (_, gateway, client):
        for _ in range(5):
            await client.get("/v1/models")
        await wait_until(lambda: gateway.access.num_left_out == 3)
        assert len(lines.records) == 2
        gateway.access.interval_end_s = 0.0
        await client.get("/v1/models")
        await wait_until(lambda: len(lines.records) == 4)
    assert lines.records[2].getMessage() == "3 requests have no line: ACCESS_LOG_RATE is 2"


async def test_load_counts_requests_for_tokens_until_their_last_byte(broker: Broker) -> None:
    async def load(client: httpx.AsyncClient) -> int:
        found: dict[str, int] = (await client.get("/load")).json()
        assert [*found] == ["server_load"]
        return found["server_load"]

    async with answering(broker.url, scripted) as (worker, _, client):
        assert await load(client) == 0
        await worker.pause()
        async with client.stream("POST", "/generate_stream", json=told()) as first:
            assert await load(client) == 1
            second = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await wait_for(lambda: load(client), 2)
            worker.going.set()
            await asyncio.gather(first.aread(), second)
        await wait_for(lambda: load(client), 0)


async def test_a_refused_action_has_a_line(broker: Broker, lines: Lines) -> None:
    async with answering(broker.url, scripted, demo=False) as (_, _, client):
        await client.post("/fleet/processes/w0/kill")
        found = await lines.one()
    assert found["status"] == 403 and found["reason"] == "forbidden" and found["client"] == "127.0.0.1"
