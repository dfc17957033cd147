"""The access log: a line for each request with what became of it, and nothing of what it said."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from api.http import middleware
from common.messages.request import Generate
from common.process.logs import TextFormatter
from deploy.launcher.embedded_broker import Broker
from tests.support.events import KEYS
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import CHAT
from tests.support.tokenizer import ids
from tests.support.waiting import wait_for, wait_until

IDS = ids(" the sea is so blue")
SECRET = "The sky over Zanzibar"


def scripted(request: Generate) -> Answer:
    return Answer(IDS, error="" if request.stopping.max_new_tokens != 13 else "forward")


def body(**parameters: Any) -> dict[str, Any]:
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
            f"{path}?x=%5Bsecret%5D", json=body(max_new_tokens=3), headers={"x-tenant": "alice"}
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


@pytest.mark.parametrize(
    ("path", "sent", "headers", "status", "route", "reason"),
    [
        ("/generate", {"inputs": SECRET, "parameters": {"top_p": 7}}, {}, 422, "/generate", "validation"),
        ("/generate", body(), {"authorization": "Bearer wrong"}, 401, "/generate", "unauthorized"),
        ('/no%0Asuch"path', body(), {}, 404, '/no\nsuch"path', "not_found"),
        ("/generate", body(max_new_tokens=13), {}, 424, "/generate", "generation"),
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
        async with client.stream("POST", "/generate_stream", json=body()) as response:
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
        job = {"id": "j1", "inputs": SECRET, "parameters": {"max_new_tokens": 3}}
        await worker.redis.xadd(KEYS.submit, {"job": json.dumps(job)})
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
        async with client.stream("POST", "/generate_stream", json=body()) as first:
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
