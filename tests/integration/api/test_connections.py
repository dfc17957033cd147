"""Connections of clients: those that disconnect have their requests cancelled, those that speak HTTP/1.0 or
close their half get their answer, and those that hold connections or do not read are cut off in time.
"""

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from api.app import Gateway
from api.http import connection_limits
from api.http import sse as sse_module
from api.http.connection_limits import NUM_RESERVED, TIMEOUTS_S
from api.requests import pool
from common.metrics import catalogue
from deploy.launcher.embedded_broker import Broker
from tests.support.events import IDS
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, nothing_left, serving
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until


async def test_a_cancel_is_retried_until_the_broker_accepts_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the limit of a cleanup is one of what follows."""
    async with answering(broker.url, Answer(IDS, ends=False)) as (worker, gateway, client):
        task = asyncio.create_task(client.post("/generate", json={"inputs": "a"}))
        await wait_until(lambda: worker.seen)
        await worker.redis.config_set("maxmemory", 1)
        try:
            with monkeypatch.context() as outage:
                outage.setattr(pool, "CLEANUP_TIMEOUT_S", 0.0)
                task.cancel()
                await wait_until(lambda: gateway.pool.cleanups)
        finally:
            await worker.redis.config_set("maxmemory", 0)
        await nothing_left(gateway, worker)


WORD_IDS: list[int] = TOKENIZER.encode(" one two three four five six").ids
TEXT = " one two three four five six"
ANSWER = Answer(WORD_IDS)
KEEP_ALIVE_S = 4.0
"""Less than the time that any other connection is kept."""
ENDLESS = Answer(WORD_IDS * 1000)


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
    async def connect(cls, base_url: Any, address: str = "127.0.0.1", deaf: bool = False) -> "RawClient":
        """One that is `deaf` takes little before it is told to read."""
        one = socket.socket()
        if deaf:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        one.bind((address, 0))
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, (base_url.host, base_url.port))
        return cls(*await asyncio.open_connection(sock=one, limit=SMALL if deaf else 2**16))

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
        assert all(word.encode() in body for word in TEXT.split())


@pytest.mark.parametrize(
    ("path", "version", "number"), [("/generate", "1.1", 3), ("/generate_stream", "1.0", 1)]
)
async def test_a_client_that_sends_no_more_gets_its_answers(
    broker: Broker, path: str, version: str, number: int
) -> None:
    async with answering(broker.url, ANSWER, step_s=0.02) as (_, _, http):
        client = await RawClient.connect(http.base_url)
        await client.send(*[request(path, version)] * number, ends=True)
        answer = await client.rest()
        assert answer.count(b" 200 OK\r\n") == number
        assert all(word.encode() in answer for word in TEXT.split())


@pytest.mark.parametrize(
    ("path", "num_tokens", "waits"),
    [("/generate", 0, False), ("/generate", 5, True), ("/generate_stream", 0, True)],
)
async def test_a_client_that_vanishes_is_noticed(
    broker: Broker, path: str, num_tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks like a client that only stopped sending, until its kernel refuses what is written. One that
    has left before anything waits for it is noticed, too.
    """
    monkeypatch.setattr(connection_limits, "CHECK_S", 0.05)
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
    monkeypatch.setitem(TIMEOUTS_S, part, 0.2)
    async with serving(broker.url) as (gateway, http):
        client = await RawClient.connect(http.base_url)
        trickling = asyncio.create_task(trickle(client, half))
        answer = await client.rest()
        trickling.cancel()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"connection: close" in answer
        assert f"The {part} did not come within 0.2 s" in answer.decode()
        client.close()
        await wait_until(lambda: not gateway.connections.regular)
    assert cut(part) == num_cut + 1
    assert f"the {part} of a request" in caplog.text


async def test_a_large_body_may_take_as_long_as_it_goes_on(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMEOUTS_S, "body", 0.2)
    monkeypatch.setattr("api.http.protocol.MIN_BODY_BYTES", 1)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    async with serving(broker.url) as (_, http):
        client = await RawClient.connect(http.base_url)
        await client.send(head + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(60):  # three times as long as a body may take
            await client.send(b"1\r\n \r\n")
            await asyncio.sleep(0.01)
        await client.send(b"2\r\n{}\r\n0\r\n\r\n")
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 422 ")
        client.close()


async def trickle(client: RawClient, half: bytes) -> None:
    """Send a text byte by byte: progress does not extend the time limit."""
    for i in range(len(half)):
        await client.send(half[i : i + 1])
        await asyncio.sleep(0.001)


async def test_a_connection_between_two_requests_may_wait_longer_than_a_head(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMEOUTS_S, "head", 0.2)
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
    monkeypatch.setattr(connection_limits, "default_max_connections", lambda: 64)
    async with batching(broker.url), answering(broker.url, ANSWER) as (_, gateway, http):
        flood = []
        for i in range(2000):
            flood.append(await RawClient.connect(http.base_url, f"127.0.1.{1 + i % 4}"))
            await flood[-1].send(HALF_HEAD if i % 2 else b"")
            if i % 200 == 0:
                assert (await http.get("/health")).status_code == 200
                answer = await http.post("/generate", json={"inputs": "x"})
                assert answer.json()["generated_text"] == TEXT
        assert len(gateway.connections.regular) <= 64 and not gateway.connections.reserved
        for client in flood:
            client.close()
        await wait_until(lambda: not gateway.connections.num_by_address.keys() - {"127.0.0.1"})
        assert len(gateway.connections.idle) == len(gateway.connections.regular)
    assert caplog.text.count("connections are cut off") == 1, "a flood is one line"


async def test_where_all_connections_have_requests_health_and_metrics_are_served(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "default_max_connections", lambda: 4)
    async with (
        batching(broker.url),
        answering(broker.url, ENDLESS, step_s=0.05) as (worker, gateway, http),
    ):
        busy = [await RawClient.connect(http.base_url, f"127.0.1.{1 + i}") for i in range(4)]
        for client in busy:
            await client.send(request("/generate_stream"))
        await wait_until(lambda: len(gateway.pool.relay.streams) == 4)
        for path in ("/health", "/ping", "/livez", "/readyz", "/load", "/metrics"):
            assert (await http.get(path)).status_code == 200
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "too many connections" in refused.json()["error"]["message"]
        reserved = await RawClient.connect(http.base_url)
        await reserved.send(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(KEEP_ALIVE_S):
            assert b" 200 OK" in await reserved.rest(), "it is closed after its only request"
        waiting = [await RawClient.connect(http.base_url) for _ in range(2 * NUM_RESERVED)]
        assert (await http.get("/health")).status_code == 200
        assert len(gateway.connections.reserved) <= NUM_RESERVED
        for client in (*busy, *waiting):
            client.close()
        await wait_until(lambda: not worker.live and not gateway.connections.reserved)
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_an_address_has_its_share_of_the_connections(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "default_max_connections", lambda: 8)
    async with answering(broker.url, ENDLESS, step_s=0.05) as (_, gateway, http):
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


NUM_TOKENS = 240
SMALL = 4096
"""Bytes of a socket's buffers: small, so that they fill soon."""
STREAM = "/generate_stream"


def long_request(path: str, num_tokens: int = NUM_TOKENS) -> bytes:
    return request(path, max_new_tokens=num_tokens, ignore_eos=True, top_n_tokens=5, details=True)


async def deaf_clients(gateway: Gateway, base_url: Any, num_clients: int) -> list[RawClient]:
    """Clients whose connections have small buffers on both sides."""
    clients = [await RawClient.connect(base_url, deaf=True) for _ in range(num_clients)]
    await wait_until(lambda: len(gateway.connections.open) == num_clients)
    for unread in gateway.connections.open:
        own = unread.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    return clients


def held(gateway: Gateway) -> int:
    return sum(unread.num_bytes for unread in gateway.connections.open)


def num_cut(reason: str) -> float:
    return catalogue.UNREAD_CUT.values[(reason,)]


@pytest.mark.parametrize(
    ("path", "ends"),
    [(STREAM, True), (STREAM, False), ("/generate", True)],
    ids=["a stream that ended", "a stream that goes on", "a whole answer"],
)
async def test_a_client_that_reads_nothing_is_cut_off_and_its_request_cancelled(
    broker: Broker, path: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.connection_limits.UNREAD_S", 1.0)
    answer = Answer(WORD_IDS * (NUM_TOKENS // 6), ends=False)  # beyond NUM_TOKENS it goes on without an end
    num_tokens = NUM_TOKENS if ends else NUM_TOKENS + 1
    before = num_cut("timeout")
    async with answering(broker.url, answer) as (worker, gateway, client):
        [deaf] = await deaf_clients(gateway, client.base_url, 1)
        await deaf.send(long_request(path, num_tokens))
        await wait_until(lambda: num_cut("timeout") == before + 1)
        assert not gateway.connections.open
        await nothing_left(gateway, worker)
        assert worker.seen


async def test_a_client_that_reads_slowly_is_not_cut_off(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a little at a time. All of it takes longer than the limit."""
    monkeypatch.setattr("api.http.connection_limits.UNREAD_S", 1.5)
    now_s = 1000.0
    monkeypatch.setattr(connection_limits, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with answering(broker.url, Answer(WORD_IDS * 200)) as (
        worker,
        gateway,
        client,
    ):
        [deaf] = await deaf_clients(gateway, client.base_url, 1)
        [unread] = gateway.connections.open
        await deaf.send(long_request(STREAM))
        await wait_until(lambda: worker.seen and not worker.live)
        content = b""
        for _ in range(5):
            taken = sse_module.bytes_taken(unread.transport)
            while sse_module.bytes_taken(unread.transport) == taken:
                content += await deaf.reader.read(SMALL)
            now_s += 1.0
            await gateway.connections.check_time()
        await wait_until(lambda: unread.num_bytes)
        assert unread in gateway.connections.open
        while b"generated_tokens" not in content:
            new = await deaf.reader.read(2**20)
            assert new, "cut off"
            content += new
        assert content.count(b"\ndata: ") + 1 >= NUM_TOKENS


async def test_the_answer_that_waited_longest_goes_when_too_much_is_unread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, limit = num_cut("bytes"), 600_000
    monkeypatch.setattr("api.http.connection_limits.MAX_UNREAD_BYTES", limit)
    async with answering(broker.url, Answer(WORD_IDS * 200)) as (worker, gateway, client):
        clients = await deaf_clients(gateway, client.base_url, 3)
        for deaf in clients:
            await deaf.send(long_request(STREAM))
        await wait_until(lambda: len(worker.seen) == 3 and not worker.live)
        await wait_until(lambda: num_cut("bytes") > before)
        await wait_until(lambda: held(gateway) <= limit)
        assert held(gateway) > 0, "not all of them are cut off"
        for deaf in clients:
            deaf.close()  # or the gateway would wait for them at its end
