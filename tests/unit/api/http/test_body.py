"""Bodies of wrong types: one error for each field, by the name that a client knows it by."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from api.errors import ApiError
from api.http.body import parse_body
from api.protocols.openai_bodies import ChatRequest
from api.protocols.responses import ResponsesRequest
from api.protocols.tgi import GenerateRequest

HI = {"role": "user", "content": "Hi"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}
PARTS = "Input should be a string, or a list of parts, each an object with a `type`"
EITHER = "Input should be a string or an object"
ARGUMENTS = "`messages[0].tool_calls[0].function.arguments`"


@pytest.mark.parametrize(
    ("schema", "body", "line"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": 3}]}, f"`messages[0].content`: {PARTS}"),
        (
            ChatRequest,
            {"messages": [HI, {"role": "user", "content": [3]}]},
            f"`messages[1].content`: {PARTS}",
        ),
        (
            ResponsesRequest,
            {"input": "a", "truncation": "auto"},
            "`truncation`: Input should be 'disabled'. Given: 'auto'",
        ),
        (ChatRequest, {"messages": [3]}, "`messages[0]`: Input should be an object"),
        (ChatRequest, {"messages": [CALL]}, f"{ARGUMENTS}: {EITHER}"),
        (ChatRequest, {"messages": [HI], "tool_choice": 3}, f"`tool_choice`: {EITHER}"),
        (
            GenerateRequest,
            {"inputs": "a", "parameters": {"stop": [1]}},
            "`parameters.stop[0]`: Input should be a valid string",
        ),
        (GenerateRequest, [1], "`body`: Input should be an object"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_once(schema: type[BaseModel], body: Any, line: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(schema, json.dumps(body).encode())
    assert refusal.value.text.removeprefix("Input validation error: ") == line
    assert refusal.value.param == line.split("`")[1]
