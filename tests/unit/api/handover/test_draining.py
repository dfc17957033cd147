"""A draining gateway takes no new connections, or refuses new requests in the words of the API, and ends with
the last of its own.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from api.app import build
from api.handover.draining import Draining, DrainingServer
from api.handover.keeper_channel import KeeperChannel
from api.lifecycle import Gateway
from api.server import own_listener
from common.settings.settings import Settings
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import wait_until

END_S = 30.0


class SlowApp:
    """Answers /slow when `finished` is set, any other path at once."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.num_slow = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.num_slow += 1
            await self.finished.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


@contextlib.asynccontextmanager
async def serving(
    app: SlowApp, timeout_s: float, is_last: bool = False
) -> AsyncIterator[tuple[DrainingServer, asyncio.Task[None], str]]:
    listener = own_listener(0)
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = DrainingServer(config, Draining(is_last=is_last), timeout_s, KeeperChannel(None))
    task = asyncio.create_task(server.serve([listener]))
    await wait_until(lambda: server.started)
    host, port = listener.getsockname()
    try:
        yield server, task, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        server.signalled.set()
        await task


def request_on(url: str) -> socket.socket:
    """A connection with a request on it, which the server's loop had no turn to take."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n")
    connection.setblocking(False)
    return connection


async def test_a_draining_server_serves_what_the_kernel_has_accepted_and_no_more() -> None:
    app, loop = SlowApp(), asyncio.get_running_loop()
    async with serving(app, 60) as (server, task, url), httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{url}/slow"))
        await wait_until(lambda: app.num_slow == 1)
        waiting = [request_on(url) for _ in range(5)]
        server.handle_exit(signal.SIGTERM, None)
        assert not await server.on_tick(1)
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/other")
        for connection in waiting:
            assert (await loop.sock_recv(connection, 1000)).startswith(b"HTTP/1.1 200")
            connection.close()
        assert not task.done()
        app.finished.set()
        assert (await slow).text == "done"
        await asyncio.wait_for(asyncio.shield(task), END_S)


async def test_the_last_server_listens_until_its_last_request_is_finished() -> None:
    app = SlowApp()
    async with serving(app, 60, is_last=True) as (server, task, url), httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{url}/slow"))
        await wait_until(lambda: app.num_slow == 1)
        server.handle_exit(signal.SIGTERM, None)
        await wait_until(lambda: server.draining.refuses)
        assert (await client.get(f"{url}/other")).text == "done"
        assert not task.done()
        app.finished.set()
        assert (await slow).text == "done"
        await asyncio.wait_for(asyncio.shield(task), END_S)


async def test_a_draining_server_waits_no_longer_than_its_timeout() -> None:
    app = SlowApp()
    async with serving(app, 0.5) as (server, task, url), httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{url}/slow"))
        await wait_until(lambda: app.num_slow == 1)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(asyncio.shield(task), END_S)
        await asyncio.wait([slow])


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
async def test_a_second_ctrl_c_ends_the_drain_and_a_second_sigterm_does_not(
    number: signal.Signals, ends: bool
) -> None:
    """A machine that shuts down sends one, and the launcher another."""
    server = DrainingServer(uvicorn.Config(SlowApp()), Draining(), 60, KeeperChannel(None))
    for _ in range(2):
        assert not server.should_exit
        server.handle_exit(number, None)
    assert server.should_exit is ends


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/generate"), ("POST", "/v1/completions"), ("GET", "/health")]
)
async def test_a_draining_gateway_refuses_new_prompts(method: str, path: str) -> None:
    draining = Draining()
    draining.refuses = True
    gateway = Gateway(Settings(redis_url="redis://127.0.0.1:1"), "g0-test", model_tokenizer())
    transport = httpx.ASGITransport(build(gateway, draining))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        refused = await client.request(method, path, json={"inputs": "a", "prompt": "a"})
        assert refused.status_code == 503
        assert "this gateway is shutting down" in refused.text
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/docs")).status_code == (await client.get("/livez")).status_code == 200


async def test_a_server_reacts_to_a_signal_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.handover.draining.SERVING_TICK_S", 3600.0)
    async with serving(SlowApp(), 60) as (server, task, _):
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(asyncio.shield(task), END_S)
