"""A gateway in this process, behind a real listener."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import uvicorn

from api.app import Gateway, build, own_listener
from api.http.protocol import HttpProtocol
from api.prompts.tokenizer import ModelTokenizer
from common.broker.keys import Keys
from common.messages.request import Generate
from common.settings.settings import Settings
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
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
            await gateway.pool.admission.check()
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


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> bytes:
    """Return the bytes of a whole stream."""
    async with client.stream("POST", "/generate_stream", json=body) as response:
        content = await response.aread()
        assert response.status_code == 200, content
        return content


async def nothing_left(gateway: Gateway, worker: FakeWorker) -> None:
    """Wait until no request is left in the gateway or in Redis."""
    await wait_until(
        lambda: not gateway.pool.relay.streams and not gateway.pool.admission.cleanups and not worker.live
    )
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
    }
    assert await worker.redis.xlen(worker.keys.requests) == 0
