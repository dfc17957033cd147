"""Clients that do not read: they are cut off in time, and what they hold is bounded."""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from api.http import unread as unread_module
from api.lifecycle import Gateway
from common.metrics import catalogue
from common.settings.fixed import FixedLimits
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

IDS: list[int] = TOKENIZER.encode(" one two three four five six").ids
NUM_TOKENS = 240
SMALL = 4096
"""Bytes of a socket's buffers: small, so that they fill soon."""
STREAM = "/generate_stream"


def body(num_tokens: int = NUM_TOKENS) -> bytes:
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "top_n_tokens": 5, "details": True}
    return json.dumps({"inputs": "x", "parameters": parameters}).encode()


class DeafClient:
    """A client that sends a request and reads only when it is told to."""

    def __init__(self, base_url: Any) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        self.socket.connect((base_url.host, base_url.port))
        self.socket.setblocking(False)

    async def post(self, path: str, content: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        data = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, num_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.socket, num_bytes)


async def deaf_clients(gateway: Gateway, base_url: Any, num_clients: int) -> list[DeafClient]:
    """Clients whose connections have small buffers on both sides."""
    clients = [DeafClient(base_url) for _ in range(num_clients)]
    await wait_until(lambda: len(gateway.unread.connections) == num_clients)
    for unread in gateway.unread.connections:
        own = unread.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    return clients


def held(gateway: Gateway) -> int:
    return sum(unread.num_bytes for unread in gateway.unread.connections)


def num_cut(reason: str) -> float:
    return catalogue.UNREAD_CUT.values[(reason,)]


@pytest.mark.parametrize(
    ("path", "ends"),
    [(STREAM, True), (STREAM, False), ("/generate", True)],
    ids=["a stream that ended", "a stream that goes on", "a whole answer"],
)
async def test_a_client_that_reads_nothing_is_cut_off_and_its_request_cancelled(
    broker: Broker, path: str, ends: bool
) -> None:
    answer = Answer(IDS * (NUM_TOKENS // 6), ends=False)  # beyond NUM_TOKENS it goes on without an end
    num_tokens = NUM_TOKENS if ends else NUM_TOKENS + 1
    before = num_cut("timeout")
    async with answering(broker.url, answer, write_timeout_s=1) as (worker, gateway, client):
        [deaf] = await deaf_clients(gateway, client.base_url, 1)
        await deaf.post(path, body(num_tokens))
        await wait_until(lambda: num_cut("timeout") == before + 1)
        assert not gateway.unread.connections
        await nothing_left(gateway, worker)
        assert worker.seen


async def test_a_client_that_reads_slowly_is_not_cut_off(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a little at a time. All of it takes longer than the limit."""
    now_s = 1000.0
    monkeypatch.setattr(unread_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with answering(broker.url, Answer(IDS * 200), write_timeout_s=1.5) as (worker, gateway, client):
        [deaf] = await deaf_clients(gateway, client.base_url, 1)
        [unread] = gateway.unread.connections
        await deaf.post(STREAM, body())
        await wait_until(lambda: worker.seen and not worker.live)
        content = b""
        for _ in range(5):
            taken = unread_module.bytes_taken(unread.transport)
            while unread_module.bytes_taken(unread.transport) == taken:
                content += await deaf.read(SMALL)
            now_s += 1.0
            await gateway.unread.check_time()
        assert unread.num_bytes and unread in gateway.unread.connections
        while b"generated_tokens" not in content:
            new = await deaf.read(2**20)
            assert new, "cut off"
            content += new
        assert content.count(b"\ndata: ") + 1 >= NUM_TOKENS


async def test_the_answer_that_waited_longest_goes_when_too_much_is_unread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, limit = num_cut("bytes"), 600_000
    monkeypatch.setattr(FixedLimits, "max_unread_bytes", limit)
    async with answering(broker.url, Answer(IDS * 200)) as (worker, gateway, client):
        clients = await deaf_clients(gateway, client.base_url, 3)
        for deaf in clients:
            await deaf.post(STREAM, body())
        await wait_until(lambda: len(worker.seen) == 3 and not worker.live)
        await wait_until(lambda: num_cut("bytes") > before)
        await wait_until(lambda: held(gateway) <= limit)
        assert held(gateway) > 0, "not all of them are cut off"
        for deaf in clients:
            deaf.socket.close()  # or the gateway would wait for them at its end
