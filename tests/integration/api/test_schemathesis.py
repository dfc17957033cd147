"""Every route is as the OpenAPI document describes it, by schemathesis."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.app import build
from api.lifecycle import Gateway
from common.messages.request import Generate
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import PATIENCE_S


async def document() -> Any:
    """The OpenAPI document of a gateway; it needs no broker."""
    app = build(Gateway(Settings(redis_url="redis://127.0.0.1:1"), "g0-test", model_tokenizer()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return (await client.get("/api-doc/openapi.json")).json()


def answer(request: Generate) -> Answer:
    """Three tokens, or as many as the request allows where the end-of-sequence token does not end it."""
    return Answer([5, 6] * (request.stopping.max_new_tokens if request.stopping.ignore_eos else 1))


@pytest.fixture(scope="module")
def base_url(shared_broker: Broker) -> Iterator[str]:
    """A gateway with a fake worker. It serves in another thread, because schemathesis blocks this one."""
    brokers.empty(shared_broker)  # of what the module before has left
    started, urls, stops = threading.Event(), list[str](), list[Any]()

    async def serve() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        async with batching(shared_broker.url), answering(shared_broker.url, answer) as (_, _, client):
            urls.append(str(client.base_url))
            stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield urls[0]
    stops[0]()
    thread.join()


@pytest.mark.parametrize("thoroughly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "all"])
def test_every_route_is_as_described(base_url: str, thoroughly: bool, subtests: pytest.Subtests) -> None:
    from tests.support.clients import described_routes  # a second, in each of the processes that collect

    described_routes.try_routes(asyncio.run(document()), base_url, thoroughly, subtests.test)
