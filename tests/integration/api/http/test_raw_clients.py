"""Clients on bare sockets: those that speak HTTP/1.0 or close their half of the connection get their answer;
those that hold connections without using them lose these, and no other client notices.
"""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from api.http import unread as unread_module
from api.http.connection_limits import NUM_RESERVED
from common.metrics import catalogue
from common.settings.fixed import FixedLimits
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, nothing_left, serving
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

IDS: list[int] = TOKENIZER.encode(" one two three four five six").ids
TEXT = " one two three four five six"
ANSWER = Answer(IDS)
KEEP_ALIVE_S = 4.0
"""Less than the time that any other connection is kept."""
ENDLESS = Answer(IDS * 1000)


def request(path: str, version: str = "1.1", **parameters: Any) -> bytes:
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 400, **parameters}}).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class RawClient:
    """A connection, and all bytes that come on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, base_url: Any, address: str = "127.0.0.1") -> "RawClient":
        place = (base_url.host, base_url.port)
        return cls(*await asyncio.open_connection(*place, local_addr=(address, 0)))

    async def send(self, *parts: bytes, ends: bool = False) -> "RawClient":
        self.writer.writelines(parts)
        await self.writer.drain()
        if ends:
            self.writer.write_eof()
        return self

    async def rest(self) -> bytes:
        """Return what comes until the connection ends."""
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read()
        return b""

    def close(self) -> None:
        self.writer.close()


def cut(reason: str) -> float:
    return catalogue.CONNECTIONS_CUT.values[(reason,)]


def text_of(body: bytes) -> str:
    """Return the text of a stream of frames, or of a whole answer."""
    if body.startswith(b"{"):
        text: str = json.loads(body)["generated_text"]
        return text
    frames = [json.loads(line[5:]) for line in body.split(b"\n") if line.startswith(b"data:")]
    return "".join(frame["token"]["text"] for frame in frames if not frame["token"]["special"])


# --- answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_version_1_0_gets_a_body_until_the_connection_ends(broker: Broker, path: str) -> None:
    async with answering(broker.url, ANSWER) as (_, _, http):
        client = await RawClient.connect(http.base_url)
        await client.send(request(path, "1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        fields = head.lower().split(b"\r\n")
        assert b"connection: close" in fields and b"connection: keep-alive" not in fields
        assert b"transfer-encoding: chunked" not in fields
        assert text_of(body) == TEXT


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_sends_no_more_gets_its_answer(broker: Broker, path: str, version: str) -> None:
    async with answering(broker.url, ANSWER, step_s=0.02) as (_, _, http):
        client = await RawClient.connect(http.base_url)
        await client.send(request(path, version), ends=True)
        answer = await client.rest()
        assert answer.count(b" 200 OK\r\n") == 1
        assert all(word.encode() in answer for word in TEXT.split())


async def test_requests_that_were_sent_before_the_end_are_all_answered(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (_, _, http):
        client = await RawClient.connect(http.base_url)
        await client.send(*[request("/generate")] * 3, ends=True)
        assert (await client.rest()).count(b" 200 OK\r\n") == 3


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize(("num_tokens", "waits"), [(0, False), (0, True), (5, True)])
async def test_a_client_that_vanishes_is_noticed(
    broker: Broker, path: str, num_tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like a client that only stopped sending, until its kernel refuses what is written. One that
    has left before anything waits for it is noticed, too.
    """
    monkeypatch.setattr(unread_module, "CHECK_S", 0.05)
    async with answering(broker.url, ENDLESS, step_s=0.02) as (worker, gateway, http):
        worker.most_tokens = num_tokens
        client = await RawClient.connect(http.base_url)
        await client.send(request(path))
        if waits:
            await wait_until(lambda: worker.seen and gateway.pool.relay.streams)
        client.close()
        await wait_until(lambda: worker.seen)
        await nothing_left(gateway, worker)


# --- limits -------------------------------------------------------------------------------------------------

HALF_HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\n"
HALF_BODY = request("/generate")[:-1]


@pytest.mark.parametrize(("part", "half"), [("head", HALF_HEAD), ("body", HALF_BODY)])
async def test_a_request_that_does_not_end_is_refused_in_time(
    broker: Broker, part: str, half: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_cut = cut(part)
    monkeypatch.setattr(FixedLimits, f"{part}_timeout_s", 0.2)
    async with serving(broker.url) as (gateway, http):
        client = await RawClient.connect(http.base_url)
        trickling = asyncio.create_task(trickle(client, half))
        answer = await client.rest()
        trickling.cancel()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"connection: close" in answer
        assert f"The {part} did not come within 0.2 s" in answer.decode()
        client.close()
        await wait_until(lambda: not gateway.limits.regular)
    assert cut(part) == num_cut + 1
    assert f"for the {part} of a request" in caplog.text


async def trickle(client: RawClient, half: bytes) -> None:
    """Send a text byte by byte: progress does not extend the time limit."""
    for i in range(len(half)):
        await client.send(half[i : i + 1])
        await asyncio.sleep(0.001)


async def test_a_connection_between_two_requests_may_wait_longer_than_a_head(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedLimits, "head_timeout_s", 0.2)
    async with serving(broker.url) as (_, http):
        used, silent = [await RawClient.connect(http.base_url) for _ in range(2)]
        await used.send(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"version" in await used.reader.readuntil(b"}")
        later = await RawClient.connect(http.base_url)
        assert await silent.rest() == await later.rest() == b"", "they are closed without a word"
        await used.send(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", ends=True)
        assert b"version" in await used.rest()


@pytest.mark.slow
async def test_thousands_of_half_requests_cost_nobody_else_a_connection(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.connection_limits.LOG_INTERVAL_S", 3600.0)
    async with batching(broker.url), answering(broker.url, ANSWER, max_connections=64) as (_, gateway, http):
        flood = []
        for i in range(2000):
            flood.append(await RawClient.connect(http.base_url, f"127.0.1.{1 + i % 4}"))
            await flood[-1].send(HALF_HEAD if i % 2 else b"")
            if i % 200 == 0:
                assert (await http.get("/health")).status_code == 200
                answer = await http.post("/generate", json={"inputs": "x"})
                assert answer.json()["generated_text"] == TEXT
        assert len(gateway.limits.regular) <= 64 and not gateway.limits.reserved
        for client in flood:
            client.close()
        await wait_until(lambda: not gateway.limits.num_by_address.keys() - {"127.0.0.1"})
        assert len(gateway.limits.idle.connections) == len(gateway.limits.regular)
    assert caplog.text.count("MAX_CONNECTIONS;") == 1, "a flood is one line"


async def test_where_all_connections_have_requests_health_and_metrics_are_served(broker: Broker) -> None:
    async with (
        batching(broker.url),
        answering(broker.url, ENDLESS, max_connections=4, step_s=0.05) as (worker, gateway, http),
    ):
        busy = [await RawClient.connect(http.base_url, f"127.0.1.{1 + i}") for i in range(4)]
        for client in busy:
            await client.send(request("/generate_stream"))
        await wait_until(lambda: len(gateway.pool.relay.streams) == 4)
        for path in ("/health", "/ping", "/livez", "/readyz", "/load", "/metrics"):
            assert (await http.get(path)).status_code == 200
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "MAX_CONNECTIONS" in refused.json()["error"]["message"]
        reserved = await RawClient.connect(http.base_url)
        await reserved.send(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(KEEP_ALIVE_S):
            assert b" 200 OK" in await reserved.rest(), "it is closed after its only request"
        waiting = [await RawClient.connect(http.base_url) for _ in range(2 * NUM_RESERVED)]
        assert (await http.get("/health")).status_code == 200
        assert len(gateway.limits.reserved) <= NUM_RESERVED
        for client in (*busy, *waiting):
            client.close()
        await wait_until(lambda: not worker.live and not gateway.limits.reserved)
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_an_address_has_its_share_of_the_connections(broker: Broker) -> None:
    async with answering(broker.url, ENDLESS, max_connections=8, step_s=0.05) as (_, gateway, http):
        greedy = [await RawClient.connect(http.base_url, "127.0.1.1") for _ in range(4)]
        for client in greedy:
            await client.send(request("/generate_stream"))
        await wait_until(lambda: len(gateway.pool.relay.streams) == 4)
        fifth = await RawClient.connect(http.base_url, "127.0.1.1")
        await fifth.send(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await fifth.rest()).startswith(b"HTTP/1.1 503 ")
        assert (await http.get("/version")).status_code == 200
        for client in greedy:
            client.close()
