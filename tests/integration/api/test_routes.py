"""Each route that makes answers keeps the contract of its row (api/protocols/table.py). Answers, streams and
errors are as /docs describes them; a client that leaves cancels its request, a stream goes on where it
stopped, and a request keeps its id and its terms, is counted, told to its webhook and not computed twice; a
job has the same answer. The body is the example of /docs: a new row is tested without a new line.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema_rs import Draft202012Validator
from redis.asyncio import Redis

from api import app
from api.app import Gateway, make_routes
from api.errors import ApiError, internal_error, invalid
from api.prompts.tokenizer import ModelTokenizer
from api.protocols import table
from api.protocols.protocol import Protocol
from api.protocols.table import PROTOCOLS
from api.requests.service_terms import MAX_DEADLINE_MS
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_admin import Figures
from tests.integration.api.test_resume import read_frames, two_gateways
from tests.support import brokers
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import Service
from tests.support.keys.issued import add_key, bearer, known
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
from tests.support.tokenizer import ids, model_tokenizer
from tests.support.toy_protocol import TOY
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import receiving

HERE = sys.modules[__name__]
IDS = ids(" one two three four five six seven eight")
JSON = {"content-type": "application/json"}
NO_JSON: list[dict[str, str]] = [
    {},
    *(
        {"content-type": kind}
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a")
    ),
]
"""Headers of bodies that a page of another origin may send without asking first."""
TERMS = {"x-priority": "batch", "x-tenant": "acme", "x-deadline-ms": "5000"}
WRONG_TERMS = [
    ("x-priority", "urgent"),
    ("x-tenant", "a b"),
    ("x-tenant", "a" * 65),
    ("x-deadline-ms", "0"),
    ("x-deadline-ms", "1.5"),
    ("x-deadline-ms", str(MAX_DEADLINE_MS + 1)),
    ("x-resume-seconds", "nan"),
    ("x-resume-seconds", "3601"),
]
OWN_OF_EACH = {"id", "created", "created_at", "completed_at", "store", "service_tier"}
"""Fields in which the answers to two equal requests, or to a request and a job, differ."""

LONG = "a " * 150_000
"""A text that is longer than the scripted worker's limit (1023 tokens), whatever its tokens are."""
GENERATING = [row for row in PROTOCOLS if row.job != "vectors"]
STREAMED = [
    row for row in GENERATING if row.streams or (row.streams is None and "stream" in row.body.model_fields)
]
WHOLE = [row for row in GENERATING if not row.streams]
POOLING = {"embed": ["/v1/embeddings"], "classify": ["/v1/rerank", "/v1/score"]}


def names(rows: Iterable[Protocol]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def url(row: Protocol) -> str:
    return row.path.replace("{model:path}", "smollm2")


def body_of(row: Protocol, streamed: bool = False) -> dict[str, Any]:
    content = row.docs["openapi_extra"]["requestBody"]["content"]
    example: dict[str, Any] = content["application/json"]["example"]
    return example | ({"stream": True} if streamed and row.streams is None else {})


def keyed(row: Protocol) -> dict[str, str]:
    return {"idempotency-key": row.name}


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(inner)


def too_long(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a prompt beyond the limit: the prompt is the longest text of an example."""
    prompt = max(texts_in(body), key=len)
    longer: dict[str, Any] = json.loads(json.dumps(body).replace(prompt, LONG))
    return longer


@cache
def document() -> Any:
    """The OpenAPI document of a gateway; it needs no broker."""
    settings = Settings(redis_url="redis://127.0.0.1:1")
    return make_routes(Gateway(settings, "g0-test", model_tokenizer())).openapi()


@cache
def validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema) | {"components": document()["components"]})


def responses_of(row: Protocol) -> Any:
    return document()["paths"][row.path.replace(":path", "")]["post"]["responses"]


def check(row: Protocol, response: httpx.Response) -> None:
    """An answer is as /docs describes it."""
    content = responses_of(row)[str(response.status_code)]["content"]
    validator(json.dumps(content["application/json"]["schema"])).validate(response.json())


def check_stream(row: Protocol, content: bytes) -> list[Any]:
    """So is a stream. Returns its events."""
    data = responses_of(row)["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    texts, schema = data.get("anyOf", ({"enum": []}, data))
    found = re.findall(r"^data: (.*)$", content.decode(), re.MULTILINE)
    events = [json.loads(one) for one in found if one not in texts["enum"]]
    for event in events:
        validator(json.dumps(schema["contentSchema"])).validate(event)
    return events


async def check_refusals(client: httpx.AsyncClient, row: Protocol) -> None:
    body, (wrong, _) = body_of(row), row.error(invalid("x"))
    field = next(iter(body))
    for content, headers, status, words in (
        (b"{", JSON, 400, "JSON"),
        (b"[]", JSON, wrong, "body"),
        (b"{}", JSON, wrong, field),
        (json.dumps(body | {field: 7}).encode(), JSON, wrong, field),
        *((json.dumps(body).encode(), kind, 415, "Content-Type") for kind in NO_JSON),
        (json.dumps(too_long(body)).encode(), JSON, wrong, "must have at most"),
        *((json.dumps(body).encode(), JSON | {name: term}, wrong, f"`{name}`") for name, term in WRONG_TERMS),
    ):
        response = await client.post(url(row), content=content, headers=headers | {"x-request-id": "mine"})
        assert (response.status_code, words in response.text) == (status, True), (content, response.text)
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"] == "mine"
        check(row, response)


async def check_job(redis: Redis, row: Protocol, answer: Any) -> None:
    """A job that names the route has the answer that HTTP has, and as its frames the pieces, or the whole."""
    if not row.prompt:
        return
    body, service = body_of(row), Service(redis)
    own = {name: body.pop(name) for name in row.prompt}
    job = own | {"url": row.path, "parameters": body.get("parameters", body)}
    await service.submit(id=row.name, reply="stream", **job)
    result, frames = await service.result(row.name), await service.stream(row.name)
    assert without_own(result) == without_own(answer)
    assert len(frames) > 2 or frames == [result]


def without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_own(inner) for name, inner in value.items() if name not in OWN_OF_EACH}
    return [without_own(inner) for inner in value] if isinstance(value, list) else value


async def check_repetition(client: httpx.AsyncClient, row: Protocol, first: httpx.Response) -> None:
    """With its key, a request that is sent again has the same answer, and another one is refused."""
    headers, body = keyed(row) | TERMS, body_of(row)
    again = await client.post(url(row), json=body, headers=headers)
    assert (again.status_code, again.content) == (200, first.content)
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (
        None,
        "true",
    )
    other = await client.post(url(row), json=body | {"unknown": 1}, headers=headers)
    assert (other.status_code, "keys for idempotent requests" in other.text) == (409, True), other.text
    check(row, other)


@pytest.fixture
def no_long_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that cannot fit is refused before it costs anything."""
    encode = ModelTokenizer.encode

    def encode_short(self: ModelTokenizer, text: str, *more: Any, **options: Any) -> Any:
        assert len(text) < len(LONG), "this is paid for in vain"
        return encode(self, text, *more, **options)

    monkeypatch.setattr(ModelTokenizer, "encode", encode_short)


@names(WHOLE)
@pytest.mark.usefixtures("no_long_tokens")
async def test_a_whole_answer_is_as_described_is_counted_told_and_keeps_its_id_and_its_terms(
    broker: Broker, row: Protocol
) -> None:
    async with (
        receiving() as receiver,
        answering(broker.url, Answer(IDS), webhook_allowed_hosts=(receiver.host,)) as (worker, _, client),
    ):
        figures = await Figures(client).begin()
        body = body_of(row) | {"webhook": receiver.hook()}
        response = await client.post(url(row), json=body, headers=TERMS)
        assert response.status_code == 200, response.text
        check(row, response)
        [request] = worker.seen
        assert request.request_id.startswith(response.headers["x-request-id"])
        assert (request.class_name, request.tenant, request.ttl_ms) == ("batch", "acme", 5000)
        await figures.until("tgi_request_count", 1)
        await wait_until(lambda: receiver.deliveries)
        assert receiver.types == [f"{row.event}.completed"]
        assert receiver.told == {
            response.json()["id"] if row.event == "response" else request.request_id[:32]
        }
        first = await client.post(url(row), json=body_of(row), headers=keyed(row) | TERMS)
        await check_repetition(client, row, first)
        await check_refusals(client, row)
        assert len(worker.seen) == 2 and len(receiver.deliveries) == 1
        await check_job(worker.redis, row, first.json())


@names(STREAMED)
async def test_a_stream_is_as_described_and_goes_on_where_it_stopped(broker: Broker, row: Protocol) -> None:
    async with two_gateways(broker.url, Answer(IDS), served_model_name="smollm2") as (
        worker,
        _,
        client,
        other,
    ):
        body = body_of(row, streamed=True)
        response = await client.post(url(row), json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert len(check_stream(row, response.content)) > 2
        assert worker.seen[0].request_id.startswith(response.headers["x-request-id"])
        one, same = [await each.post(url(row), json=body, headers=keyed(row)) for each in (client, other)]
        assert same.headers["idempotency-replayed"] == "true" and same.content == one.content
        if not row.resumable:
            return
        client.headers["x-resume-seconds"] = "600"
        first, place = await read_frames(client, url(row), body, 4)
        rest, _ = await read_frames(other, place, None, last_id=4)
        again, _ = await read_frames(other, place, None)
        ordinals = [int(ordinal) for ordinal in re.findall(rb"^id: (\d+)$", again, re.MULTILINE)]
        assert first + rest == again and ordinals == [*range(1, again.count(b"\n\n") + 1)]
        assert (await other.get(place, headers={"last-event-id": f"{ordinals[-1]}"})).status_code == 204
        headers = {"last-event-id": "4", "x-request-id": place.split("/")[2]}
        assert (await client.post(url(row), json=body, headers=headers)).content == rest
        assert len(worker.seen) == 3


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Protocol:
    """A gateway with this protocol alone: what is made of the rows at import is made again."""
    monkeypatch.setattr(table, "PROTOCOLS", (TOY,))
    monkeypatch.setitem(table.BY_PATH, TOY.path, TOY)
    (checks, _), *others = app.ROUTERS
    monkeypatch.setattr(app, "ROUTERS", ((checks, (table.make_router(),)), *others))
    for where, made in ((app, app.checked_routes), (HERE, document), (HERE, validator)):
        monkeypatch.setattr(where, made.__name__, cache(made.__wrapped__))
    return TOY


@pytest.mark.usefixtures("no_long_tokens")
async def test_a_protocol_is_one_file_and_one_row(broker: Broker, toy: Protocol) -> None:
    """The recipe of CONTRIBUTING.md: the contract holds for a new row, with nothing else."""
    await test_a_whole_answer_is_as_described_is_counted_told_and_keeps_its_id_and_its_terms(broker, toy)
    brokers.empty(broker)
    await test_a_stream_is_as_described_and_goes_on_where_it_stopped(broker, toy)


@names(STREAMED)
async def test_a_stream_whose_client_leaves_is_cancelled(broker: Broker, row: Protocol) -> None:
    async with answering(broker.url, Answer(IDS, ends=False)) as (worker, gateway, client):
        async with client.stream("POST", url(row), json=body_of(row, streamed=True)) as response:
            async for _ in response.aiter_raw():
                break
        await all_left(gateway, worker)


@names(WHOLE)
async def test_an_answer_whose_client_leaves_is_cancelled(broker: Broker, row: Protocol) -> None:
    async with answering(broker.url, Answer(IDS, ends=False)) as (worker, gateway, client):
        task = asyncio.create_task(client.post(url(row), json=body_of(row)))
        await wait_until(lambda: worker.live)
        task.cancel()
        await asyncio.wait([task])
        await all_left(gateway, worker)


async def all_left(gateway: Gateway, worker: Any) -> None:
    await wait_until(lambda: not gateway.pool.relay.streams and not worker.live)


@names(GENERATING)
async def test_failures_have_the_form_of_the_api(
    broker: Broker, redis: Redis, row: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last event of a stream, a body that is too large, a request without the key or with that of
    another model, and a crash.
    """
    failing = Answer(IDS, error="forward")
    elsewhere = await add_key(redis, models=["llama"])
    settings: dict[str, Any] = {"api_key": "sesame", "payload_limit": 5000}
    async with answering(broker.url, failing, served_model_name="smollm2", **settings) as (
        _,
        gateway,
        client,
    ):
        for key in (None, "sesame", "Bearer", "Bearer sésame", "Bearer sesame2", "Basic sesame"):
            headers = {} if key is None else {b"authorization": key.encode()}
            refused = await client.post(url(row), json=body_of(row), headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            check(row, refused)
        await known([gateway], elsewhere)
        refused = await client.post(url(row), json=body_of(row), headers=bearer(elsewhere))
        assert refused.status_code == 403 and "may not use the model" in refused.text
        client.headers["authorization"] = "BEARER  sesame"
        refused = await client.post(url(row), content=b"x" * 5001, headers=JSON)
        assert refused.status_code == 413 and "5000 bytes" in refused.text
        check(row, refused)
        response = await client.post(url(row), json=body_of(row))
        if not row.streams and row.path != "/v1/responses":  # a response says itself that it has failed
            assert response.status_code == row.error(ApiError(424, "generation", ""))[0]
            check(row, response)
        assert "forward failed" in response.text
        if row in STREAMED:
            content = (await client.post(url(row), json=body_of(row, streamed=True))).content
            assert "forward failed" in str(check_stream(row, content)[-1])
        monkeypatch.setattr(gateway.pool, "check_admission", lambda: 1 / 0)
        crashed = await client.post(url(row), json=body_of(row))
        assert (crashed.status_code, crashed.json()) == row.error(internal_error())
        assert crashed.headers["connection"] == "close"


@pytest.mark.parametrize("kind", POOLING)
@pytest.mark.usefixtures("no_long_tokens")
async def test_vectors_and_scores_are_as_described(broker: Broker, tmp_path: Path, kind: str) -> None:
    model = save_encoder(tmp_path, "BERT", **({"num_labels": 1} if kind == "classify" else {}))
    async with pooling_gateway(broker.url, tmp_path, model, kind) as (worker, _, client):
        for row in PROTOCOLS:
            if row.path in POOLING[kind]:
                response = await client.post(url(row), json=body_of(row), headers=keyed(row) | TERMS)
                assert response.status_code == 200, response.text
                check(row, response)
                num_seen = len(worker.seen)
                await check_repetition(client, row, response)
                await check_refusals(client, row)
                assert len(worker.seen) == num_seen
                await check_job(worker.redis, row, response.json())
    assert {row.path for row in PROTOCOLS if row.job == "vectors"} == {
        path for paths in POOLING.values() for path in paths
    }
