"""Gateway processes: their listeners, their names and their ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from api.http.sse import KEEP_ALIVE_S
from api.server import lossy, shared_listener
from api.streams.http_response import TokenStream
from common.settings.settings import SettingError
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, stream
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.forks.client import ForkedProcess
from tests.support.machine.ports import free_port
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until


def start(broker: Broker, name: str, port: int, **variables: str) -> subprocess.Popen[str]:
    own = {
        "PROCESS_NAME": name,
        "REDIS_URL": broker.url,
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "PYTHONPATH": os.getcwd(),
        "WORKER_GRACE_S": "3600",  # a scripted worker shows itself once
    }
    environ = {key: value for key, value in os.environ.items() if key != "INCARNATION"} | own | variables
    return ForkedProcess([sys.executable, "-m", "api"], env=environ, stderr=subprocess.PIPE, text=True)


@dataclass
class Pair:
    """Two gateways that share a port; each has one of its own. The second one's relay loses messages."""

    url: str
    own_urls: list[str]
    processes: list[subprocess.Popen[str]]


@pytest.fixture
def pair(broker: Broker) -> Iterator[Pair]:
    port, first, second = free_port(), str(free_port()), str(free_port())
    processes = [
        start(broker, "g0", port, GATEWAY_PORT=first),
        start(broker, "g1", port, GATEWAY_PORT=second, TOKENFLEET_TEST_LOSE="0.2:7"),
    ]
    yield Pair(
        f"http://127.0.0.1:{port}", [f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"], processes
    )
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_gateways_share_a_port_and_drain_at_sigterm(broker: Broker, pair: Pair) -> None:
    ids = TOKENIZER.encode(" one two three four five six seven eight").ids

    async def talk() -> bytes:
        async with httpx.AsyncClient(base_url=pair.url, timeout=90) as client:
            return await stream(client, {"inputs": "count", "parameters": {"max_new_tokens": len(ids)}})

    async with (
        batching(broker.url),
        working(broker.url, TOKENIZER, lambda _: Answer(ids), step_s=0.05) as worker,
    ):
        for url in pair.own_urls:
            await wait_until(lambda url=url: healthy(url))  # type: ignore[misc]
        titles = {" ".join(psutil.Process(process.pid).cmdline()).strip() for process in pair.processes}
        assert titles == {"tokenfleet api g0", "tokenfleet api g1"}
        talks = [asyncio.create_task(talk()) for _ in range(16)]
        await wait_until(lambda: len(worker.seen) == 16)
        assert {request.gateway.split("-")[0] for request in worker.seen} == {"g0", "g1"}
        for process in pair.processes:
            process.send_signal(signal.SIGTERM)
        contents = await asyncio.gather(*talks)
        assert len(set(contents)) == 1 and contents[0].count(b"data: ") == len(ids)
        assert [await asyncio.to_thread(process.wait, 20) for process in pair.processes] == [0, 0]
        assert not await worker.redis.keys("*:gateway:*") and not await worker.redis.keys("*:request:*")


async def healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


def test_a_taken_port_is_one_error_line_and_ex_config(broker: Broker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(broker, "g0", taken.getsockname()[1])
        error = process.communicate(timeout=60)[1]
    assert process.returncode == os.EX_CONFIG
    assert "PORT: cannot listen on 127.0.0.1:" in error and len(error.splitlines()) == 1


def test_gateways_listen_on_listen_host_or_name_the_error() -> None:
    for host in ("0.0.0.0", "127.0.0.1", "::1"):
        with shared_listener(host, 0) as one:
            assert one.getsockname()[0] == host
    with pytest.raises(SettingError, match=r"PORT: cannot listen on 192\.0\.2\.1:"):
        shared_listener("192.0.2.1", 0)


def test_lossy_drops_its_share_of_messages() -> None:
    lose = lossy("0.25:3")
    assert lose is not None and lossy("") is None
    assert 200 < sum(lose() for _ in range(1000)) < 300


async def test_a_silent_stream_gets_keep_alive_comments(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KEEP_ALIVE_S == 15
    init = TokenStream.__init__

    def hasty(self: TokenStream, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.ping_interval = 0.05

    monkeypatch.setattr(TokenStream, "__init__", hasty)
    async with (
        answering(broker.url, Answer([], ends=False)) as (_, _, client),
        client.stream("POST", "/generate_stream", json={"inputs": "a"}) as response,
    ):
        seen = b""
        async for chunk in response.aiter_raw():
            seen += chunk
            if len(seen) >= 8:
                break
    assert seen.startswith(b": \n\n: \n\n")
