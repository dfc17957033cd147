"""Every route is as the OpenAPI document describes it, by schemathesis."""

import asyncio
import threading
from collections.abc import Callable, Iterator
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
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
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


EMBED_PATHS = ("/v1/embeddings",)
SCORE_PATHS = ("/v1/rerank", "/v1/score")


@pytest.fixture(scope="module")
def base_urls(
    shared_broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Gateways with fake workers: of a model that generates, one that embeds and one that classifies. They
    serve in another thread, because schemathesis blocks this one.
    """
    brokers.empty(shared_broker)  # of what the module before has left
    started, urls, stops = threading.Event(), dict[str, str](), list[Any]()
    url, embeds, scores = shared_broker.url, *(tmp_path_factory.mktemp(name) for name in ("embeds", "scores"))
    encoder, classifier = save_encoder(embeds, "BERT"), save_encoder(scores, "BERT", num_labels=1)

    async def serve() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        async with (
            batching(url),
            answering(url, answer, files_dir=str(tmp_path_factory.mktemp("files"))) as (_, _, client),
            pooling_gateway(url, embeds, encoder, pool="embeds") as (_, _, embedder),
            pooling_gateway(url, scores, classifier, "classify", pool="scores") as (_, _, scorer),
        ):
            urls.update(dict.fromkeys(EMBED_PATHS, str(embedder.base_url)))
            urls.update(dict.fromkeys(SCORE_PATHS, str(scorer.base_url)))
            urls[""] = str(client.base_url)
            stops.append(lambda: loop.call_soon_threadsafe(stopped.set))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    yield lambda path: urls.get(path, urls[""])
    stops[0]()
    thread.join()


@pytest.mark.parametrize("thoroughly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "all"])
def test_every_route_is_as_described(
    base_urls: Callable[[str], str], thoroughly: bool, subtests: pytest.Subtests
) -> None:
    from tests.support.clients import described_routes  # a second, in each of the processes that collect

    described_routes.try_routes(asyncio.run(document()), base_urls, thoroughly, subtests.test)
