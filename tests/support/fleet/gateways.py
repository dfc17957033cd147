"""Gateways behind real listeners: in this process, and in processes of their own."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import httpx
import uvicorn

from api.app import Gateway, build, own_listener
from api.http.protocol import HttpProtocol
from api.prompts.tokenizer import ModelTokenizer
from common.broker.keys import Keys
from common.messages.request import Generate
from common.settings.settings import Settings
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.forks.client import ForkedProcess
from tests.support.machine.ports import free_port
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_until

SETTINGS: dict[str, Any] = {
    "heartbeat_s": 0.05,
    "worker_grace_s": 3600,
}  # a scripted worker shows itself once


@contextlib.asynccontextmanager
async def serving(
    url: str,
    lose: Callable[[], bool] | None = None,
    name: str = "g0-test",
    tokenizer: ModelTokenizer | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that serves while the context is open, and a client that talks to it."""
    own = Settings(redis_url=url, **(SETTINGS | settings))
    gateway = Gateway(own, name, tokenizer or model_tokenizer(), lose)
    listener = own_listener(0)
    host, port = listener.getsockname()
    config = uvicorn.Config(build(gateway), log_config=None, http=HttpProtocol, timeout_graceful_shutdown=5)
    server = await start(config, listener)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", timeout=90, limits=httpx.Limits(max_connections=None)
        ) as client:
            yield gateway, client
    finally:
        await stop(server, listener)


async def start(config: uvicorn.Config, listener: socket.socket) -> uvicorn.Server:
    """Start as uvicorn's `serve` does, without its loop that checks ten times a second whether to end."""
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    await server.on_tick(0)
    return server


async def stop(server: uvicorn.Server, listener: socket.socket) -> None:
    """Stop as uvicorn's `shutdown` does, but without its sleep if nobody is connected."""
    with contextlib.suppress(TimeoutError):
        await wait_until(lambda: not server.server_state.connections, 0.05)
    if server.server_state.connections or server.server_state.tasks:
        await server.shutdown([listener])
        return
    for one in server.servers:
        one.close()
    listener.close()
    await server.lifespan.shutdown()


async def ready(gateway: Gateway) -> None:
    """Wait until the gateway accepts requests."""

    async def serves() -> bool:
        with contextlib.suppress(Exception):
            await gateway.pool.check_admission()
            return True
        return False

    await wait_until(serves)


@contextlib.asynccontextmanager
async def answering(
    url: str,
    answer: Answer | Callable[[Generate], Answer],
    step_s: float = 0.0,
    tokenizer: ModelTokenizer | None = None,
    sees: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[FakeWorker, Gateway, httpx.AsyncClient]]:
    """A worker that gives this answer, a gateway that is ready, and a client. The model `sees` pictures."""
    scripted = answer if callable(answer) else lambda _: answer
    backend = tokenizer.backend if tokenizer else TOKENIZER
    async with (
        working(url, backend, scripted, step_s, sees=sees) as worker,
        serving(url, tokenizer=tokenizer, **settings) as (gateway, client),
    ):
        await ready(gateway)
        yield worker, gateway, client


async def nothing_left(gateway: Gateway, worker: FakeWorker) -> None:
    """Wait until no request is left in the gateway or in Redis."""
    await wait_until(lambda: not gateway.pool.relay.streams and not gateway.pool.cleanups and not worker.live)
    assert not gateway.pool.relay.filler.doubtful
    names = [key.decode() for key in await worker.redis.keys("*")]
    kinds = {name.split(":")[2] for name in names if not name.startswith(Keys.usage)}
    assert kinds <= {
        "log",
        "reports",
        "worker",
        "workers",
        "gateway",
        "processes",
        "control",
        "requests",
        "submit",
        "tenants",
        "metrics",
        "arq",
    }
    assert await worker.redis.xlen(worker.keys.requests) == 0


# --- gateway processes --------------------------------------------------------------------------------------


def start_process(url: str, name: str, port: int, **variables: str) -> "subprocess.Popen[str]":
    own = {
        "PROCESS_NAME": name,
        "REDIS_URL": url,
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "HEARTBEAT_S": "0.1",
        "PYTHONPATH": os.getcwd(),
        "WORKER_GRACE_S": "3600",  # a scripted worker shows itself once
    }
    environ = {key: value for key, value in os.environ.items() if key != "INCARNATION"} | own | variables
    return ForkedProcess([sys.executable, "-m", "api"], env=environ, stderr=subprocess.PIPE, text=True)


async def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/health")).status_code == 200
    return False


class GatewayProcesses:
    """Gateways that share a port; each has one of its own beside it. `settings` are their variables."""

    def __init__(self, url: str, count: int = 2, **settings: str) -> None:
        self.port = free_port()
        ports = [free_port() for _ in range(count)]
        self.url = f"http://127.0.0.1:{self.port}"
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.processes = [
            start_process(url, f"g{place}", self.port, GATEWAY_PORT=str(port), **settings)
            for place, port in enumerate(ports)
        ]

    async def until_healthy(self) -> None:
        for url in self.urls:
            await wait_until(lambda url=url: healthy(url))  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
