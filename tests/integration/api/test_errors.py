"""Errors have the object of their API family, the OpenAPI document is true of every route, and a request
leaves no garbage for a full collection, which would hold the event loop.
"""

import asyncio
import json
import re
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from api.errors import ApiError, conflict, failed, invalid, openai, overloaded, unavailable
from common.messages.events import Terminal, terminal_for
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_routes import document
from tests.support import brokers
from tests.support.answers import openai_error, tgi_error
from tests.support.fleet.batchers import batching
from tests.support.fleet.gateways import answering, ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import PATIENCE_S

JSON = {"content-type": "application/json"}


async def test_unreadable_bodies_are_refused(broker: Broker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b" " * 1000

    async with answering(broker.url, Answer([1]), payload_limit=5000) as (_, _, client):
        assert tgi_error(await client.post("/generate", content=endless(), headers=JSON)) == (
            413,
            "payload_too_large",
        )
        packed = await client.post("/generate", content=b"x", headers=JSON | {"content-encoding": "gzip"})
        assert tgi_error(packed) == (415, "unsupported_media_type") and "Encoding: gzip`" in packed.text
        odd = {"content-type": "Application/vnd.api+JSON; charset=utf-8", "content-encoding": "identity"}
        assert (await client.post("/generate", content=b'{"inputs":"a"}', headers=odd)).status_code == 200
        large = b'{"inputs":"' + b"a" * 4900 + b'","parameters":{"truncate":5}}'
        assert (await client.post("/generate", content=large, headers=JSON)).status_code == 200
        for content in (b'{"inputs":"a"} b', b'{"inputs":"\xff"}', b'{"inputs":"\\ud800"}', b"[" * 4000):
            refused = await client.post("/generate", content=content, headers=JSON)
            assert tgi_error(refused) == (400, "invalid_json") and "Invalid JSON" in refused.text
        vast = b'{"inputs":"a","parameters":{"max_new_tokens":1' + b"0" * 4900 + b"}}"
        assert "out of range" in (await client.post("/generate", content=vast, headers=JSON)).text


async def test_unknown_routes_are_404_and_unknown_methods_405(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        assert tgi_error(await client.get("/nothing")) == (404, "not_found")
        assert tgi_error(await client.get("/v11")) == (404, "not_found")
        wrong = await client.get("/generate")
        assert tgi_error(wrong) == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
        assert (await client.put("/")).headers["allow"] == "GET, HEAD, POST"
        for path in ("/v1", "/v1/nothing"):
            assert openai_error(await client.get(path)) == (404, "invalid_request_error", None)
        wrong = await client.get("/v1/completions")
        assert (
            openai_error(wrong) == (405, "invalid_request_error", None) and wrong.headers["allow"] == "POST"
        )


@pytest.mark.parametrize(
    "garbage", [b"garbage\r\n\r\n", b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n"]
)
async def test_requests_that_are_not_http_get_400(broker: Broker, garbage: bytes) -> None:
    async with serving(broker.url) as (_, client):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(garbage)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"x-request-id: " in head
    assert json.loads(body) == {"error": "Invalid HTTP request received.", "error_type": "bad_request"}


REFUSALS = [
    (ApiError(400, "invalid_json", "x"), 400, "invalid_request_error", None),
    (ApiError(401, "unauthorized", "x"), 401, "authentication_error", "invalid_api_key"),
    (
        ApiError(404, "model_not_found", "x", "model", "model_not_found"),
        404,
        "invalid_request_error",
        "model_not_found",
    ),
    (ApiError(413, "payload_too_large", "x"), 413, "invalid_request_error", None),
    (ApiError(415, "unsupported_media_type", "x"), 415, "invalid_request_error", None),
    (invalid("x", "stop"), 400, "invalid_request_error", None),
    (failed(Terminal("r", "error", 0, "two workers died")), 500, "server_error", "generation"),
    (failed(terminal_for("r", "timeout", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "expired", 0)), 408, "timeout", "timeout"),
    (failed(terminal_for("r", "no_worker", 0)), 500, "server_error", "unavailable"),
    (failed(terminal_for("r", "client", 0)), 500, "server_error", "cancelled"),
    (failed(terminal_for("r", "grammar", 0)), 400, "invalid_request_error", "grammar"),
    (failed(terminal_for("r", "grammar_limit", 0)), 400, "invalid_request_error", "grammar"),
    (conflict("request"), 409, "invalid_request_error", "conflict"),
    (overloaded(), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (unavailable("no worker"), 503, "server_error", "unavailable"),
]


@pytest.mark.parametrize(("refusal", "status", "kind", "code"), REFUSALS)
def test_openai_s_error_object(refusal: ApiError, status: int, kind: str, code: str | None) -> None:
    answer = {"error": {"message": refusal.text, "type": kind, "param": refusal.param, "code": code}}
    assert openai(refusal) == (status, answer)


async def test_health_is_503_until_a_worker_is_ready(broker: Broker) -> None:
    async with batching(broker.url), serving(broker.url) as (gateway, client):
        for path in ("/health", "/ping", "/readyz", "/"):
            assert tgi_error(await client.get(path)) == (503, "healthcheck")
        async with working(broker.url, TOKENIZER, lambda _: Answer([1])):
            await ready(gateway)
            for path in ("/health", "/ping", "/readyz", "/"):
                health = await client.get(path)
                assert (health.status_code, health.content) == (200, b"")
                assert (await client.head(path)).status_code == 200
        assert "/generate_stream" in (await client.get("/api-doc/openapi.json")).json()["paths"]


@pytest.fixture(scope="module")
def described() -> Any:
    return document()


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


def test_every_reference_leads_somewhere(described: Any) -> None:
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert {node["$ref"] for node in nodes(described) if isinstance(node.get("$ref"), str)} <= known
    assert not any("$defs" in node for node in nodes(described))
    assert "securitySchemes" not in described["components"]
    assert operation_ids(described) == sorted(set(operation_ids(described)))


def test_every_route_that_takes_an_idempotency_key_describes_it_and_its_conflict(described: Any) -> None:
    posts = {path: methods["post"] for path, methods in described["paths"].items() if "post" in methods}
    taking = {path for path, operation in posts.items() if "idempotency-key" in headers_of(operation)}
    assert taking == {path for path, operation in posts.items() if "x-priority" in headers_of(operation)}
    assert {"/generate", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/vertex"} <= taking
    assert not {"/tokenize", "/v1/batches"} & taking
    for path in taking:
        shape = posts[path]["responses"]["503"]["content"]
        assert posts[path]["responses"]["409"]["content"] == shape, path


def headers_of(operation: dict[str, Any]) -> set[str]:
    return {one["name"].lower() for one in operation.get("parameters", []) if one["in"] == "header"}


def operation_ids(document: dict[str, Any]) -> list[str]:
    return sorted(
        operation["operationId"] for methods in document["paths"].values() for operation in methods.values()
    )


async def test_the_api_key_is_described_if_it_is_set(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
    assert document["components"]["securitySchemes"] == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    assert all(
        document["paths"][path]["post"]["security"] == [{"HTTPBearer": []}]
        for path in ("/generate", "/tokenize")
    )
    assert "security" not in document["paths"]["/health"]["get"]


def test_every_operation_has_a_tag_a_summary_a_description_and_a_plain_id(described: Any) -> None:
    tags = {tag["name"]: tag["description"] for tag in described["tags"]}
    used, summaries = set[str](), list[str]()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            [tag] = operation["tags"]
            used.add(tag)
            summaries.append(operation["summary"])
            assert re.fullmatch(r"[A-Z][a-z]+[\w ,'()/]+", operation["summary"]), path
            assert operation["description"].endswith("."), path
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", operation["operationId"]), path
    assert used == set(tags)
    assert len(set(summaries)) == len(summaries)


def test_every_part_of_a_path_is_described_and_no_error_has_another_shape_than_ours(described: Any) -> None:
    listed = described["paths"]["/v1/responses/{response_id}/input_items"]["get"]["responses"]
    assert "400" in listed and "422" not in listed
    assert "422" in described["paths"]["/requests/{request_id}/stream"]["get"]["responses"]
    assert not any("HTTPValidationError" in str(node) for node in described["components"]["schemas"])
    for node in nodes(described["paths"]):
        assert node.get("in") != "path" or node["description"].endswith("."), node


async def test_the_introduction_s_commands_work(broker: Broker) -> None:
    async with answering(broker.url, Answer([5, 6]), api_key="sesame") as (_, pool, client):
        description = (await client.get("/api-doc/openapi.json")).json()["info"]["description"]
        commands = [shlex.split(one) for one in re.findall(r"```shell\n(.*?)```", description, re.DOTALL)]
        assert len(commands) == 2
        for curl, url, *flags in commands:
            assert curl == "curl" and url.startswith(f"http://localhost:{pool.settings.port}/")
            values = [value for flag, value in pairwise(flags) if flag in ("-H", "-d")]
            *lines, data = [value.replace("$API_KEY", "sesame") for value in values]
            headers = dict(line.split(": ") for line in lines)
            path = "/" + url.split("/", 3)[3]
            response = await client.post(path, headers=headers, content=data)
            assert response.status_code == 200, response.text
            assert ("data: [DONE]" in response.text) == bool(json.loads(data).get("stream"))


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
    base_urls: Callable[[str], str], described: Any, thoroughly: bool, subtests: pytest.Subtests
) -> None:
    from tests.support.clients import described_routes  # a second, in each of the processes that collect

    described_routes.try_routes(described, base_urls, thoroughly, subtests.test)
