"""What tests of unmodified clients ask: the same of each."""

from typing import Any

import pydantic

QUESTION = "Name three colours."
ABOUT_BOB = "Bob is 32 years old. Answer as JSON with his name and his age."
TOO_LONG = "word " * 20_000
MODEL = "smollm2"
WARM = "How warm is it in Rome?"
WARM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 12}},
    "required": ["place"],
    "additionalProperties": False,
}
WARM_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a place", "parameters": WARM_SCHEMA},
}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
