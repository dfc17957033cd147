"""What tests of the Responses API share: bodies, and events checked by OpenAI's own types."""

import json
from functools import cache
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi"}


@cache
def event_type() -> TypeAdapter[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    return adapter


def check_response(content: dict[str, Any]) -> Response:
    """The response, whose fields are those that OpenAI's package requires."""
    return Response.model_validate(content, strict=False)


def read_events(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream. Each must be one of OpenAI's types, under its name, and in its place."""
    events = []
    for text in content.decode().split("\n\n")[:-1]:
        name, number, data = [line for line in text.split("\n") if line != ": "]
        event = json.loads(data.removeprefix("data: "))
        event_type().validate_python(event)
        assert name == f"event: {event['type']}"
        assert number == f"id: {event['sequence_number'] + 1}"
        events.append(event)
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
