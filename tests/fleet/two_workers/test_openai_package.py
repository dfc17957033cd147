"""OpenAI's own package against a whole fleet with the real model."""

from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types import CompletionUsage
from transformers import AutoTokenizer

from common import model_files

MODEL = "smollm2"
CHAT: list[Any] = [{"role": "user", "content": "Name three colours."}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}


async def test_a_chat_is_the_same_streamed_and_whole(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**GREEDY)
    [choice] = whole.choices
    tokenizer = AutoTokenizer.from_pretrained(model_files.resolve(MODEL))
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    same = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
    assert choice.message.content and choice.message.content == same.choices[0].text
    assert whole.usage is not None and whole.usage.prompt_tokens == len(tokenizer(prompt)["input_ids"])
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    assert chunks[-1].usage is not None and totals(chunks[-1].usage) == totals(whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def totals(usage: CompletionUsage) -> tuple[int, int, int]:
    """Usage without cached tokens, whose number depends on the worker."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def test_choices_differ_and_a_seed_repeats_them(client: AsyncOpenAI) -> None:
    async def texts(seed: int) -> list[str | None]:
        warm = GREEDY | {"temperature": 1.5, "n": 2, "seed": seed, "max_tokens": 8}
        return [choice.message.content for choice in (await client.chat.completions.create(**warm)).choices]

    first, again, other = await texts(1), await texts(1), await texts(2)
    assert first == again
    assert len({*first, *other}) == 4


async def test_refusals_are_the_exceptions_of_the_package(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**GREEDY | {"temperature": -1}, stream=True)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**GREEDY | {"model": "gpt-5"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="`web_search_options` is not supported yet"):
        await client.chat.completions.create(**GREEDY, web_search_options={})
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


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
