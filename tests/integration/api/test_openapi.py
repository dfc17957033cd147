"""The OpenAPI document: complete, resolvable, in plain words, and true of what routes return."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from jsonschema_rs import Draft202012Validator

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.tgi.test_frames import frames
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_worker import Answer

TAKES_BODY = [
    "/",
    "/generate",
    "/generate_stream",
    "/tokenize",
    "/chat_tokenize",
    "/v1/chat/completions",
    "/v1/completions",
]
EVERYTHING = {"details": True, "best_of": 2, "do_sample": True, "top_n_tokens": 2, "max_new_tokens": 4}


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


async def test_every_body_is_described_and_every_reference_leads_somewhere(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
        assert "/api-doc/openapi.json" in (await client.get("/docs")).text
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert {node["$ref"] for node in nodes(document) if isinstance(node.get("$ref"), str)} <= known
    assert not any("$defs" in node for node in nodes(document))
    for path in TAKES_BODY:
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {"200", "400", "401", "413", "415"} <= set(operation["responses"])
    assert "securitySchemes" not in document["components"]
    assert operation_ids(document) == sorted(set(operation_ids(document)))


async def test_every_route_that_takes_an_idempotency_key_describes_it_and_its_conflict(
    broker: Broker,
) -> None:
    async with serving(broker.url) as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    taking = {path for path, operation in posts.items() if takes_key(operation)}
    assert taking == {path for path, operation in posts.items() if "x-priority" in headers_of(operation)}
    assert {"/generate", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/vertex"} <= taking
    assert not {"/tokenize", "/v1/batches"} & taking
    for path in taking:
        shape = posts[path]["responses"]["503"]["content"]
        assert posts[path]["responses"]["409"]["content"] == shape, path


def takes_key(operation: dict[str, Any]) -> bool:
    return "idempotency-key" in headers_of(operation)


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
    assert all(document["paths"][path]["post"]["security"] == [{"HTTPBearer": []}] for path in TAKES_BODY)
    assert "security" not in document["paths"]["/health"]["get"]


async def test_every_operation_has_a_tag_a_summary_a_description_and_a_plain_id(broker: Broker) -> None:
    async with serving(broker.url) as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
    tags = {tag["name"]: tag["description"] for tag in document["tags"]}
    used, summaries = set[str](), list[str]()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            [tag] = operation["tags"]
            used.add(tag)
            summaries.append(operation["summary"])
            assert re.fullmatch(r"[A-Z][a-z]+[\w ,'()/]+", operation["summary"]), path
            assert operation["description"].endswith("."), path
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", operation["operationId"]), path
    assert used == set(tags)
    assert len(set(summaries)) == len(summaries)


async def test_every_part_of_a_path_is_described_and_no_error_has_another_shape_than_ours(
    broker: Broker,
) -> None:
    async with serving(broker.url) as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
        wrong = await client.get("/v1/responses/resp_1/input_items", params={"limit": "many"})
    assert wrong.status_code == 400
    described = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]["responses"]
    assert "400" in described and "422" not in described
    assert "422" in document["paths"]["/requests/{request_id}/stream"]["get"]["responses"]
    assert not any("HTTPValidationError" in str(node) for node in document["components"]["schemas"])
    for node in nodes(document["paths"]):
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


async def test_answers_are_as_described(broker: Broker) -> None:
    """Answers have everything in them, and no field that the description lacks."""
    async with answering(broker.url, Answer([5, 6])) as (_, _, client):
        document = (await client.get("/api-doc/openapi.json")).json()

        def check(path: str, method: str, status: int, answer: Any) -> None:
            content = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]
            Draft202012Validator(content["schema"] | {"components": document["components"]}).validate(answer)

        for path, method, body in [
            ("/generate", "post", {"inputs": "a", "parameters": EVERYTHING}),
            ("/generate", "post", {"inputs": "a"}),
            ("/generate", "post", {"inputs": ""}),
            ("/", "post", {"inputs": "a", "parameters": EVERYTHING}),
            ("/tokenize", "post", {"inputs": "a b"}),
            ("/chat_tokenize", "post", {"messages": [{"role": "user", "content": "a"}]}),
            ("/info", "get", None),
        ]:
            response = await client.request(method, path, json=body)
            check(path, method, response.status_code, response.json())
        parameters = EVERYTHING | {"best_of": 1}
        shown = frames(
            (await client.post("/generate_stream", json={"inputs": "a", "parameters": parameters})).content
        )
    event = document["paths"]["/generate_stream"]["post"]["responses"]["200"]["content"]["text/event-stream"][
        "schema"
    ]
    frame = event["properties"]["data"]["contentSchema"] | {"components": document["components"]}
    for one in shown:
        Draft202012Validator(frame).validate(one)
    assert shown[-1]["details"] and shown[-1]["top_tokens"]


async def test_the_errors_of_requests_that_end_late_are_described(broker: Broker) -> None:
    """They are described as a response, and as the last event of a stream."""
    async with serving(broker.url) as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert "408" in document["paths"][path]["post"]["responses"]
    for path, shape in [("/generate_stream", "ErrorResponse"), ("/v1/chat/completions", "OpenAIError")]:
        answer = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert shape in [node.get("title") for node in nodes(answer)]
