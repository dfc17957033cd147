"""Texts that a grammar forces, with the names of special tokens in them, are answered as they are."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.answers import CHAT, CHAT_PATH, frames, streamed

pytestmark = pytest.mark.slow

NAME = "a<|im_end|>b <|im_start|>"
PLAIN = CHAT | {"temperature": 0, "max_tokens": 80}


def object_with(key: str, value: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {key: value},
        "required": [key],
        "additionalProperties": False,
    }


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


FORCED: list[tuple[dict[str, Any], Any]] = [
    (schema({"enum": [NAME]}), NAME),
    (schema(object_with(NAME, {"const": 1})), {NAME: 1}),
    ({"structured_outputs": {"regex": r'"a<\|im_end\|>[b] <\|im_start\|>"'}}, NAME),
    ({"structured_outputs": {"choice": [f'"{NAME}"']}}, NAME),
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": object_with("x", {"enum": [NAME]}), "strict": True},
}


async def test_each_kind_of_grammar_gives_the_text(http: httpx.AsyncClient) -> None:
    bodies = [PLAIN | fields for fields, _ in FORCED]
    whole = await asyncio.gather(*(http.post(CHAT_PATH, json=body) for body in bodies))
    streams = await asyncio.gather(*(streamed(http, CHAT_PATH, body) for body in bodies))
    for answer, stream, (_, expected) in zip(whole, streams, FORCED, strict=True):
        [choice] = answer.json()["choices"]
        assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == (expected, "stop")
        choices = [frame["choices"][0] for frame in frames(stream)]
        assert json.loads("".join(choice["delta"].get("content", "") for choice in choices)) == expected
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_tools_enum_gives_the_text(http: httpx.AsyncClient) -> None:
    body = PLAIN | {"tools": [TOOL], "tool_choice": "required"}
    whole, stream = await asyncio.gather(http.post(CHAT_PATH, json=body), streamed(http, CHAT_PATH, body))
    [choice] = whole.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    calls = [call for frame in frames(stream) for call in frame["choices"][0]["delta"].get("tool_calls", [])]
    for arguments in (
        call["function"]["arguments"],
        "".join(call["function"]["arguments"] for call in calls),
    ):
        assert json.loads(arguments) == {"x": NAME}


RESPONSE = {"model": "tgi", "input": "a"}
UNWRITABLE = "\U00040000"
"""A text for whose first byte the model's vocabulary has no token."""


async def test_a_grammar_that_leads_nowhere_is_the_requests_fault(http: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "name": "s", "schema": {"enum": [UNWRITABLE]}}
    created = await http.post("/v1/responses", json=RESPONSE | {"text": {"format": form}})
    assert (created.status_code, created.json()["error"]["code"]) == (400, "grammar")
    stream = await streamed(http, "/v1/responses", RESPONSE | {"text": {"format": form}})
    failed = json.loads(stream.decode().rpartition("data: ")[2])["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
