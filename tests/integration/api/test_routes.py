"""Each route that makes answers keeps the contract of its row (api/protocols/table.py). Answers, streams and
errors are as /docs describes them; a client that leaves cancels its request, a stream goes on where it
stopped, and a request keeps its id and is counted. The body is the example of
/docs: a new row is tested without a new line.
"""

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema_rs import Draft202012Validator

from api.errors import ApiError, internal_error, invalid
from api.lifecycle import Gateway
from api.protocols.protocol import Protocol
from api.protocols.table import PROTOCOLS
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_admin import Figures
from tests.integration.api.test_resume import read_frames, two_gateways
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.pooling.pooling_gateway import pooling_gateway
from tests.support.pooling.tiny_encoders import save_encoder
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

IDS = ids(" one two three four five six seven eight")
JSON = {"content-type": "application/json"}
GENERATING = [row for row in PROTOCOLS if row.counts]
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


class Described:
    """A route, as the OpenAPI document has it."""

    def __init__(self, document: Any, row: Protocol) -> None:
        path = row.path.replace(":path", "")
        self.responses = document["paths"][path]["post"]["responses"]
        self.components = {"components": document["components"]}

    def check(self, response: httpx.Response) -> None:
        content = self.responses[str(response.status_code)]["content"]
        Draft202012Validator(content["application/json"]["schema"] | self.components).validate(
            response.json()
        )

    def check_stream(self, content: bytes) -> list[Any]:
        """Returns its events."""
        data = self.responses["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
        texts, schema = data.get("anyOf", ({"enum": []}, data))
        found = re.findall(r"^data: (.*)$", content.decode(), re.MULTILINE)
        events = [json.loads(one) for one in found if one not in texts["enum"]]
        validator = Draft202012Validator(schema["contentSchema"] | self.components)
        for event in events:
            validator.validate(event)
        return events


async def described(client: httpx.AsyncClient, row: Protocol) -> Described:
    return Described((await client.get("/api-doc/openapi.json")).json(), row)


async def check_refusals(client: httpx.AsyncClient, row: Protocol) -> None:
    shown, (wrong, _) = await described(client, row), row.error(invalid("x"))
    body = body_of(row)
    field = next(iter(body))
    for content, headers, status, words in (
        (b"{", JSON, 400, "JSON"),
        (b"[]", JSON, wrong, "body"),
        (b"{}", JSON, wrong, field),
        (json.dumps(body | {field: 7}).encode(), JSON, wrong, field),
        (json.dumps(body).encode(), {}, 415, "Content-Type"),
        (b"x" * 5001, JSON, 413, "5000 bytes"),
    ):
        response = await client.post(url(row), content=content, headers=headers)
        assert (response.status_code, words in response.text) == (status, True), (content, response.text)
        assert response.headers["content-type"] == "application/json"
        shown.check(response)


@names(WHOLE)
async def test_a_whole_answer_is_as_described_is_counted_and_keeps_its_id(
    broker: Broker, row: Protocol
) -> None:
    async with answering(broker.url, Answer(IDS), payload_limit=5000) as (worker, _, client):
        figures = await Figures(client).begin()
        response = await client.post(url(row), json=body_of(row))
        assert response.status_code == 200, response.text
        (await described(client, row)).check(response)
        assert worker.seen[0].request_id.startswith(response.headers["x-request-id"])
        await figures.until("tgi_request_count", 1)
        await check_refusals(client, row)
        assert len(worker.seen) == 1


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
        assert len((await described(client, row)).check_stream(response.content)) > 2
        assert worker.seen[0].request_id.startswith(response.headers["x-request-id"])
        if not row.resumable:
            return
        client.headers["x-resume-seconds"] = "600"
        first, place = await read_frames(client, url(row), body, 4)
        rest, _ = await read_frames(other, place, None, last_id=4)
        again, _ = await read_frames(other, place, None)
        assert first + rest == again
        headers = {"last-event-id": "4", "x-request-id": place.split("/")[2]}
        assert (await client.post(url(row), json=body, headers=headers)).content == rest
        assert len(worker.seen) == 2


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
    broker: Broker, row: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last event of a stream, a request without the key, and a crash."""
    failing = Answer(IDS, error="the worker says no")
    async with answering(broker.url, failing, api_key="sesame", served_model_name="smollm2") as (
        _,
        gateway,
        client,
    ):
        shown = await described(client, row)
        for key in (None, "sesame", "Bearer", "Bearer sésame", "Bearer sesame2", "Basic sesame"):
            headers = {} if key is None else {b"authorization": key.encode()}
            refused = await client.post(url(row), json=body_of(row), headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            shown.check(refused)
        client.headers["authorization"] = "Bearer sesame"
        response = await client.post(url(row), json=body_of(row))
        if not row.streams and row.path != "/v1/responses":  # a response says itself that it has failed
            assert response.status_code == row.error(ApiError(424, "generation", ""))[0]
            shown.check(response)
        assert "the worker says no" in response.text
        if row in STREAMED:
            content = (await client.post(url(row), json=body_of(row, streamed=True))).content
            assert "the worker says no" in str(shown.check_stream(content)[-1])
        monkeypatch.setattr(gateway.pool.admission, "check", lambda: 1 / 0)
        crashed = await client.post(url(row), json=body_of(row))
        assert (crashed.status_code, crashed.json()) == row.error(internal_error())
        assert crashed.headers["connection"] == "close"


@pytest.mark.parametrize("kind", POOLING)
async def test_vectors_and_scores_are_as_described(broker: Broker, tmp_path: Path, kind: str) -> None:
    model = save_encoder(tmp_path, "BERT", **({"num_labels": 1} if kind == "classify" else {}))
    async with pooling_gateway(broker.url, tmp_path, model, kind, payload_limit=5000) as (_, _, client):
        for row in PROTOCOLS:
            if row.path in POOLING[kind]:
                response = await client.post(url(row), json=body_of(row))
                assert response.status_code == 200, response.text
                (await described(client, row)).check(response)
                await check_refusals(client, row)
    assert {row.path for row in PROTOCOLS if not row.counts} == {
        path for paths in POOLING.values() for path in paths
    }
