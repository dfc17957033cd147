"""Structured output reaches the workers from every API, in every shape of its field."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from api.grammar.compile import Grammar, compile_checked
from api.grammar.read import ANY_OBJECT
from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT, CHAT_PATH, frames, streamed
from tests.support.deep_grammars import SCHEMA as SCHEMA_OF_MANY
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import Service
from tests.support.tokenizer import ids

KEYS = Keys("default")
OBJECT: Any = {"response_format": {"type": "json_object"}}
VLLM: Any = {"structured_outputs": {"json_object": True}}
SCHEMA = {"type": "object"}
TGI: Any = {"inputs": "a", "parameters": {"grammar": {"type": "json_object", "value": SCHEMA}}}
COMPLETION = {"prompt": "a"}
JSON_BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT | OBJECT),
    ("/v1/chat/completions", CHAT | VLLM),
    ("/v1/completions", COMPLETION | OBJECT),
    ("/v1/completions", COMPLETION | VLLM),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}),
    ("/generate", TGI),
    ("/", TGI),
    ("/invocations", CHAT | OBJECT),
]
JOBS: list[Any] = [
    TGI,
    {**CHAT, "parameters": OBJECT},
    {**CHAT, "parameters": VLLM},
]
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
TAGGED: list[Any] = [{"response_format": TAG}, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}]


@pytest.fixture
def service(redis: Redis) -> Service:
    return Service(redis)


async def test_any_json_object_can_be_requested_in_every_api(broker: Broker, service: Service) -> None:
    expected = compile_checked(Grammar("json", ANY_OBJECT, "f"))
    async with answering(broker.url, Answer(ids("{}"))) as (worker, _, client):
        for path, body in JSON_BODIES:
            answer = await client.post(path, json={"model": "default"} | body if "/v1" in path else body)
            assert answer.status_code == 200, (path, answer.text)
        for i, job in enumerate(JOBS):
            await service.submit(id=f"j{i}", **job)
            assert "error" not in await service.result(f"j{i}")
    assert len(worker.seen) == len(JSON_BODIES) + len(JOBS)
    assert {one.sampling.grammar if one.sampling else "" for one in worker.seen} == {expected}


async def test_definitions_that_lead_deep_end_no_gateway(broker: Broker, service: Service) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_OF_MANY}}
    first = {"type": "object", "properties": {"x": {"$ref": SCHEMA_OF_MANY["$ref"]}}}
    tool = {"name": "f", "parameters": first | {"$defs": SCHEMA_OF_MANY["$defs"]}}
    tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    message = {"name": "f", "input_schema": tool["parameters"]}
    grammar = {"grammar": {"type": "json", "value": SCHEMA_OF_MANY}}
    bodies: list[tuple[str, Any]] = [
        (CHAT_PATH, CHAT | {"response_format": form}),
        (CHAT_PATH, CHAT | tools),
        ("/v1/completions", COMPLETION | {"response_format": form}),
        ("/v1/responses", {"input": "a", "text": {"format": {**form, **form["json_schema"]}}}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "tools": [message], "tool_choice": {"type": "any"}}),
        ("/generate", {"inputs": "a", "parameters": grammar}),
    ]
    async with answering(broker.url, Answer(ids("{}"))) as (worker, _, client):
        for path, body in bodies:
            answer = await client.post(path, json={"model": "default"} | body if "/v1" in path else body)
            is_shown = "tools" in body  # the prompt has them, and is too long
            assert (answer.status_code, "1023 tokens" in answer.text) == (
                (400, True) if is_shown else (200, False)
            )
        for i, job in enumerate([{"inputs": "a", "parameters": grammar}, {**CHAT, "parameters": tools}]):
            await service.submit(id=f"j{i}", **job)
            assert ("1023 tokens" in str(await service.result(f"j{i}"))) == (i == 1)
    assert len(worker.seen) == 5


@pytest.mark.slow
async def test_structural_tags_reach_the_workers(broker: Broker, service: Service) -> None:
    async with answering(broker.url, Answer(ids("a"))) as (worker, _, client):
        for fields in TAGGED:
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
                answer = await client.post(path, json=body | fields)
                assert answer.status_code == 200, (path, answer.text)
        await service.submit(id="j", **CHAT, parameters=TAGGED[0])
        assert "error" not in await service.result("j")
        wrong = await client.post(
            "/v1/completions", json=COMPLETION | {"response_format": {**TAG, "triggers": ["x"]}}
        )
    sources = {one.sampling.grammar if one.sampling else "" for one in worker.seen}
    assert len(worker.seen) == 5 and len(sources) == 1 and "</f>" in sources.pop()
    assert wrong.json()["error"]["param"] == "response_format.structures.0.begin"


WHOLE = '{"a": [1]}'
INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
AT_THE_LIMIT: list[tuple[str, dict[str, Any], str]] = [
    (WHOLE, OBJECT, "stop"),
    (WHOLE + " ", VLLM, "stop"),
    (WHOLE[:-1], OBJECT, "length"),
    (WHOLE, {"structured_outputs": {"regex": ".*"}}, "length"),
    (WHOLE, {}, "length"),
    ("12", {"response_format": INTEGER}, "length"),
]


@pytest.mark.parametrize(("text", "fields", "reason"), AT_THE_LIMIT)
async def test_a_complete_json_ends_with_stop_even_at_max_tokens(
    broker: Broker, text: str, fields: dict[str, Any], reason: str
) -> None:
    answer, tool = Answer(ids(text), ends=False), {"type": "function", "function": {"name": "f"}}
    limit = {"max_tokens": len(answer.ids)}
    async with answering(broker.url, answer) as (_, _, client):
        for path, body in (
            (CHAT_PATH, CHAT),
            (CHAT_PATH, CHAT | {"tools": [tool]}),
            ("/v1/completions", {"model": "default", **COMPLETION}),
        ):
            whole = (await client.post(path, json=body | fields | limit)).json()
            *_, last = frames(await streamed(client, path, body | fields | limit))
            assert whole["choices"][0]["finish_reason"] == last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("text", "status"), [(WHOLE, "completed"), (WHOLE[:-1], "incomplete")])
async def test_a_response_with_a_complete_json_is_completed(broker: Broker, text: str, status: str) -> None:
    answer = Answer(ids(text), ends=False)
    body = {"model": "default", "input": "a", "text": {"format": {"type": "json_object"}}}
    async with answering(broker.url, answer) as (_, _, client):
        found = await client.post("/v1/responses", json=body | {"max_output_tokens": len(answer.ids)})
        assert found.json()["status"] == status
