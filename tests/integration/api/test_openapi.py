"""The description of the API: whole, resolvable, and true of what routes answer."""

from collections.abc import Iterator
from typing import Any

from jsonschema_rs import Draft202012Validator

from deploy.serve.broker import Broker
from tests.integration.api.test_tgi_frames import frames
from tests.support.fleet.gateways import model_tokenizer, ready, serving
from tests.support.fleet.scripted_worker import Answer, working

TOKENIZER = model_tokenizer().backend
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


def operation_ids(document: dict[str, Any]) -> list[str]:
    return sorted(
        operation["operationId"] for methods in document["paths"].values() for operation in methods.values()
    )


async def test_a_key_is_described_where_there_is_one(broker: Broker) -> None:
    async with serving(broker.url, api_key="sesame") as (_, client):
        document = (await client.get("/api-doc/openapi.json")).json()
    assert document["components"]["securitySchemes"] == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    assert all(document["paths"][path]["post"]["security"] == [{"HTTPBearer": []}] for path in TAKES_BODY)
    assert "security" not in document["paths"]["/health"]["get"]


async def test_answers_are_as_described(broker: Broker) -> None:
    """Those with everything in them, and no field that the description does not know."""
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([5, 6])),
        serving(broker.url) as (gateway, client),
    ):
        await ready(gateway)
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
