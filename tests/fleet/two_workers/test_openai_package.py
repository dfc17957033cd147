"""OpenAI's own package against a whole fleet with the real model."""

from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI

MODEL = "smollm2"


async def test_a_parsed_answer_is_an_object_of_its_class(client: AsyncOpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        age: int = pydantic.Field(ge=0, le=120)
        likes: list[Literal["chess", "go", "tea"]] = pydantic.Field(max_length=3)

    question: Any = [{"role": "user", "content": "Bob is 32 and likes chess. Describe him as JSON."}]
    for temperature in (0, 1.2):
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=question, response_format=Person, max_tokens=150, temperature=temperature
        )
        [choice] = parsed.choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    with pytest.raises(openai.BadRequestError, match="keyword `uniqueItems`") as refusal:
        schema: Any = {"name": "s", "schema": {"type": "array", "uniqueItems": True}}
        await client.chat.completions.create(
            model=MODEL, messages=question, response_format={"type": "json_schema", "json_schema": schema}
        )
    assert refusal.value.param == "response_format.json_schema.schema"


# --- tools --------------------------------------------------------------------------------------------------


class GetWeather(pydantic.BaseModel):
    """The weather at a place."""

    place: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


class AddNumbers(pydantic.BaseModel):
    first: int = pydantic.Field(ge=0, le=99)
    second: int = pydantic.Field(ge=0, le=99)


MODELS: dict[str, type[pydantic.BaseModel]] = {"GetWeather": GetWeather, "AddNumbers": AddNumbers}
TOOLS: list[Any] = [openai.pydantic_function_tool(model) for model in MODELS.values()]
LOOSE: list[Any] = [{**tool, "function": tool["function"] | {"strict": False}} for tool in TOOLS]
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How warm is it in Rome?"}],
    "max_tokens": 120,
}


async def test_a_call_that_is_required_is_valid(client: AsyncOpenAI) -> None:
    body = ASK | {"temperature": 1.3, "seed": 5, "parallel_tool_calls": False}
    required = await client.chat.completions.create(**body, tools=LOOSE, tool_choice="required")
    [choice] = required.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    MODELS[call.function.name].model_validate_json(call.function.arguments)
    named: Any = {"type": "function", "function": {"name": "AddNumbers"}}
    forced = await client.chat.completions.create(**body, tools=LOOSE, tool_choice=named)
    [choice] = forced.choices
    assert choice.finish_reason == "stop", "as OpenAI ends a call of the function that the client chose"
    [call] = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "AddNumbers"
    AddNumbers.model_validate_json(call.function.arguments)
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "GetWeather"}}],
        },
    }
    parsed = await client.chat.completions.parse(**body, tools=TOOLS, tool_choice=allowed)
    [function] = [call.function for call in parsed.choices[0].message.tool_calls or []]
    assert isinstance(function.parsed_arguments, GetWeather)
