"""A gateway dies in the middle of its answers, and no client notices: another gateway, or its own successor,
goes on with each at the next byte. A keeper in this process keeps their sockets, as the launcher does.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import uvicorn
from redis.asyncio import Redis

from api.app import Gateway, build, own_listener
from api.handover.answer_socket import KeeperChannel
from api.handover.draining import GatewayServer
from api.http.protocol import HttpProtocol
from api.http.sse import KEEP_ALIVE_S
from api.streams.http_response import TokenStream
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from deploy.launcher.launcher import command
from deploy.launcher.process import SupervisedProcess
from deploy.launcher.socket_keeper import SocketKeeper
from tests.support.answers import CHAT
from tests.support.broker_state import KEYS
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import SETTINGS, ready
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.forks.client import create_subprocess_exec
from tests.support.machine.ports import free_port
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer
from tests.support.waiting import wait_until


class KeptGateways:
    """Supervised gateways that share a port; each that ends is started again."""

    def __init__(self, redis_url: str, count: int, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.keeper = SocketKeeper(orphan_s=3600.0)  # a gateway may start for long on a busy machine
        own = {
            "REDIS_URL": redis_url,
            "HOSTNAME": "127.0.0.1",
            "PORT": str(self.port),
            "PYTHONPATH": os.getcwd(),
        }
        environ = own | {"HEARTBEAT_S": "0.05", "WORKER_GRACE_S": "3600"} | variables
        self.processes = [
            SupervisedProcess(
                "gateway", f"g{i}", command("api"), environ, open_channel=self.keeper.open_channel
            )
            for i in range(count)
        ]

    async def supervise(self, process: SupervisedProcess) -> None:
        while process.should_run:
            await process.run_once()

    async def all_ready(self) -> None:
        """Returns when every gateway takes answers of others, and all accept requests."""
        await wait_until(lambda: sum(one.takes for one in self.keeper.channels) == len(self.processes))

        async def healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"{self.url}/health")).status_code == 200
            return False

        await wait_until(healthy)

    async def end(self, process: SupervisedProcess, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a gateway; returns when its successor runs."""
        assert process.running is not None
        pid = process.running.pid
        process.send(number)
        await wait_until(lambda: process.running is not None and process.running.pid != pid)


@contextlib.asynccontextmanager
async def kept_gateways(redis_url: str, count: int, **variables: Any) -> AsyncIterator[KeptGateways]:
    gateways = KeptGateways(redis_url, count, **variables)
    with patch.object(asyncio, "create_subprocess_exec", create_subprocess_exec):
        tasks = [asyncio.create_task(gateways.supervise(process)) for process in gateways.processes]
        try:
            await gateways.all_ready()
            yield gateways
        finally:
            gateways.keeper.close()
            for process in gateways.processes:
                process.should_run = False
                process.kill()
            await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def keeping(
    redis_url: str, keeper: SocketKeeper, name: str
) -> AsyncIterator[tuple[GatewayServer, int]]:
    """A gateway in this process whose sockets are kept, and its port."""
    gateway = Gateway(Settings(redis_url=redis_url, **SETTINGS), name, model_tokenizer())
    channel, listener = KeeperChannel(keeper.open_channel()), own_listener(0)
    config = uvicorn.Config(build(gateway, channel), log_config=None, http=HttpProtocol)
    server = GatewayServer(config, channel, 60)
    port: int = listener.getsockname()[1]
    task = asyncio.create_task(server.serve([listener]))
    await wait_until(lambda: server.started or task.done())
    await ready(gateway)
    try:
        yield server, port
    finally:
        server.should_exit = True
        server.signalled.set()
        await task


# --- talk ---------------------------------------------------------------------------------------------------

DIFFERS = re.compile(
    rb"HTTP/1.1 100 Continue\r\n\r\n|[0-9a-f]{32}|\"created(?:_at)?\":\d+|\ndate: [^\r]*"
    rb"|\nx-[a-z-]*time[a-z-]*: [^\r]*|\n[Cc]onnection: close\r|3\r\n: \n\r\n|4\r\n: \n\n\r\n"
)
"""What differs between two answers to one request: interim responses, ids, seconds, times, and comments."""


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Talk:
    """A plain socket's request, and all bytes of its response."""

    def __init__(
        self,
        port: int,
        path: str,
        body: dict[str, Any],
        slow: bool = False,
        pipelined: bool = False,
        version: str = "1.1",
        sends_no_more: bool = False,
    ) -> None:
        self.port, self.path, self.body, self.slow, self.pipelined = port, path, body, slow, pipelined
        self.version, self.sends_no_more = version, sends_no_more
        self.seen = b""

    async def run(self) -> bytes:
        self.seen = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        content = json.dumps(self.body).encode()
        head = f"POST {self.path} HTTP/{self.version}\r\nhost: test\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        writer.write(request * 2 if self.pipelined else request)
        if self.sends_no_more:
            writer.write_eof()
        try:
            await self.read(reader)
        finally:
            writer.close()
        return DIFFERS.sub(b"", self.seen)

    async def read(self, reader: asyncio.StreamReader) -> None:
        while not is_whole(self.seen.replace(INTERIM, b"")):
            data = await reader.read(700 if self.slow else 65536)
            if not data and self.version == "1.0" and b"\r\n\r\n" in self.seen:
                return  # its body ends with the connection
            assert data, f"{self.path} is cut: {self.seen[-300:]!r}"
            self.seen += data
            if self.slow:
                await asyncio.sleep(0.002)
        if self.pipelined:
            assert await reader.read() == b""


def is_whole(seen: bytes) -> bool:
    head, found, body = seen.partition(b"\r\n\r\n")
    if length := re.search(rb"content-length: (\d+)", head):
        return bool(found) and len(body) == int(length[1])
    return body.endswith(b"\r\n0\r\n\r\n")


# --- handover -----------------------------------------------------------------------------------------------

USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TENSOR = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi", "stream": True, "parameters": {"seed": 3, "do_sample": True}}),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2} | USAGE),
    ("/v1/chat/completions", CHAT | {"stream": True, "stop": ["zzz", " six"], "skip_special_tokens": False}),
    (
        "/v1/completions",
        {"prompt": ["a é", "b"], "stream": True, "n": 2, "echo": True, "logprobs": 1} | USAGE,
    ),
    ("/v2/models/tgi/generate_stream", {"text_input": "Hi", "parameters": {"details": True}}),
]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi"}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "prompt_logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["a", "b c"], "return_generation_logits": True}),
    ("/v1/responses", {"input": "Hi"}),
    ("/vertex", {"instances": [{"inputs": "a"}, CHAT]}),
    ("/v2/models/tgi/infer", {"id": "5", "inputs": [TENSOR], "parameters": {"return_full_text": True}}),
]


COMMENT_CHUNK = b"4\r\n: \n\n\r\n"
ANSWER = Answer(ids(" one two é🙂 three four five" * 6))


@pytest.mark.slow
async def test_no_client_notices_the_end_of_its_gateway(broker: Broker, redis: Redis) -> None:
    """One gateway gets SIGKILL, the other SIGTERM, in the middle of all routes' answers, streamed and whole.
    Each answer is byte for byte as without the signals, and responses are stored. Half of the sockets are
    read slowly.
    """
    async with (
        working(broker.url, TOKENIZER, lambda _: ANSWER, step_s=0.15) as worker,
        batching(broker.url),
        kept_gateways(broker.url, 2) as gateways,
    ):
        port = gateways.port
        talks = [Talk(port, *one, slow=i % 2 == 0) for i, one in enumerate([*STREAMED, *WHOLE] * 2)]
        for one in (STREAMED[0], WHOLE[0]):
            talks += [Talk(port, *one, version="1.0"), Talk(port, *one, sends_no_more=True)]
        worker.step_s = 0.0
        undisturbed = await asyncio.gather(*(talk.run() for talk in talks))
        worker.step_s, seen = 0.15, len(worker.seen)
        worker.most_tokens = 3  # clients take long to start on a busy machine
        running = [asyncio.create_task(talk.run()) for talk in talks]
        for process, number in zip(gateways.processes, (signal.SIGKILL, signal.SIGTERM), strict=True):
            await wait_until(lambda: len(gateways.keeper.kept) == len(running))
            await wait_until(lambda: len(worker.seen) - seen == seen)
            worker.most_tokens = sys.maxsize
            done = [live.num_tokens for live in worker.live.values()]
            await wait_until(
                lambda done=done: all(  # type: ignore[misc]
                    live.num_tokens > before + 3
                    for live, before in zip(worker.live.values(), done, strict=True)
                )
            )
            worker.step_s = 0.5  # a gateway takes long to end on a busy machine
            await gateways.end(process, number)
            assert not any(task.done() for task in running), "nothing was in its middle"
            worker.step_s = 0.15
        worker.step_s = 0.0
        assert await asyncio.gather(*running) == undisturbed
        await wait_until(lambda: not gateways.keeper.kept)
        for talk in talks:
            for stored in re.findall(rb"resp_([0-9a-f]{32})", talk.seen):
                assert await redis.exists(KEYS.request(stored.decode()))


async def test_comments_stay_at_their_places(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gateways in turn write one stream, with keep-alive comments between its frames."""
    assert KEEP_ALIVE_S == 15
    make_hasty(monkeypatch)
    keeper = SocketKeeper()
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(ids(" one two three four five"))) as worker,
        keeping(broker.url, keeper, "g0") as (first, port),
        keeping(broker.url, keeper, "g1") as (second, _),
        keeping(broker.url, keeper, "g2"),
    ):
        undisturbed = await Talk(port, "/generate_stream", {"inputs": "Hi"}).run()
        worker.step_s = 0.4
        talk = Talk(port, "/generate_stream", {"inputs": "Hi"})
        running = asyncio.create_task(talk.run())
        for i, server in enumerate((first, second), 1):
            await wait_until(lambda i=i: talk.seen.count(b"data: ") > i and talk.seen.endswith(COMMENT_CHUNK))  # type: ignore[misc]
            server.handle_exit(signal.SIGTERM, None)
        answer = await running
        assert answer == undisturbed
        assert talk.seen.count(COMMENT_CHUNK) > 4
        assert not talk.seen.endswith(COMMENT_CHUNK)
    keeper.close()


def make_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    init = TokenStream.__init__

    def hasty(self: TokenStream, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.ping_interval = 0.03

    monkeypatch.setattr(TokenStream, "__init__", hasty)


async def test_a_client_that_leaves_while_no_gateway_lives_is_noticed(broker: Broker) -> None:
    """The successor of the only gateway cancels its request. Another connection, on which a second request
    already waits, gets the whole first answer, and is then closed.
    """
    body = {"inputs": "Hi"}
    async with (
        working(broker.url, TOKENIZER, lambda _: ANSWER) as worker,
        batching(broker.url),
        kept_gateways(broker.url, 1) as gateways,
    ):
        undisturbed = await Talk(gateways.port, "/generate_stream", body).run()
        worker.step_s = 0.15
        leaving = Talk(gateways.port, "/generate_stream", body)
        staying = Talk(gateways.port, "/generate_stream", body, pipelined=True)
        tasks = [asyncio.create_task(talk.run()) for talk in (leaving, staying)]
        await wait_until(lambda: leaving.seen.count(b"data: ") > 3 and staying.seen.count(b"data: ") > 3)
        await worker.pause()
        gateways.processes[0].kill()
        tasks[0].cancel()
        await wait_until(lambda: not any(channel.takes for channel in gateways.keeper.channels))
        await gateways.all_ready()
        worker.going.set()
        await wait_until(lambda: len(worker.live) == 1)
        assert not tasks[1].done()
        worker.step_s = 0.0
        assert await tasks[1] == undisturbed
        await wait_until(lambda: not gateways.keeper.kept)
