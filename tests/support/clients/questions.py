"""What tests of unmodified clients ask: the same of each."""

from typing import Any

import pydantic

QUESTION = "Name three colours."
ABOUT_BOB = "Bob is 32 years old. Answer as JSON with his name and his age."
TOO_LONG = "word " * 20_000
MODEL = "smollm2"


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
