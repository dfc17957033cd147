"""litellm: its providers for OpenAI's API, for vLLM and for TGI, and its router."""

import json
import os
from typing import Any

import pytest

from tests.support.clients.questions import (
    ABOUT_BOB,
    MODEL,
    QUESTION,
    TOO_LONG,
    WARM,
    WARM_TOOL,
    Person,
    user,
)
from tests.support.fleet.fleet import Fleet

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the Internet at its import
litellm: Any = pytest.importorskip("litellm")
pytestmark = pytest.mark.slow
PROVIDERS = ("openai", "hosted_vllm")


def given(provider: str, url: str, **more: Any) -> dict[str, Any]:
    about = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none"}
    return about | {"temperature": 0, "max_tokens": 12} | more


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_is_the_same_streamed_and_whole(provider: str, url: str) -> None:
    body = given(provider, url, messages=user(QUESTION))
    whole = litellm.completion(**body)
    chunks = [*litellm.completion(**body, stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_class_as_response_format_is_filled(provider: str, url: str) -> None:
    answer = litellm.completion(
        **given(provider, url, messages=user(ABOUT_BOB), max_tokens=80, response_format=Person)
    )
    assert Person.model_validate_json(answer.choices[0].message.content).age <= 120


@pytest.mark.parametrize("provider", PROVIDERS)
def test_too_long_a_prompt_is_its_own_exception(provider: str, url: str) -> None:
    """By it callers trim the chat, or fall back to another model."""
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**given(provider, url, messages=user(TOO_LONG)))


def test_choices_differ_and_have_logprobs(url: str) -> None:
    body = given("openai", url, messages=user(QUESTION), n=2, logprobs=True, top_logprobs=2, user="u")
    answer = litellm.completion(**body | {"temperature": 1.5, "seed": 1})
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_each_prompt_of_a_completion_has_a_choice(url: str) -> None:
    prompts = [f"{i}, {i + 1}," for i in range(8)]
    body = given("text-completion-openai", url, prompt=prompts, max_tokens=3)
    assert len(litellm.text_completion(**body).choices) == 8


async def test_an_async_call_and_an_async_stream(url: str) -> None:
    body = given("openai", url, messages=user(QUESTION))
    whole = await litellm.acompletion(**body)
    texts = [
        chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**body, stream=True)
    ]
    assert "".join(texts) == whole.choices[0].message.content


def test_its_provider_for_tgi_is_answered(fleet: Fleet) -> None:
    body = given("huggingface", fleet.base_url, messages=user(QUESTION)) | {"model": "huggingface/tgi"}
    assert litellm.completion(**body).choices[0].message.content


def test_the_router_falls_back_where_a_prompt_is_too_long(url: str) -> None:
    params = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 4}
    echo = {"model": "openai/none", "api_key": "none", "mock_response": "the larger model"}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": params},
            {"model_name": "large", "litellm_params": echo},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
    )
    assert router.completion(model="small", messages=user(QUESTION)).choices[0].message.content
    answer = router.completion(model="small", messages=user(TOO_LONG))
    assert answer.choices[0].message.content == "the larger model"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_is_called_and_its_result_is_answered(provider: str, url: str) -> None:
    body = given(provider, url, messages=user(WARM), tools=[WARM_TOOL], tool_choice="required", max_tokens=80)
    body["parallel_tool_calls"] = False
    message = litellm.completion(**body).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather" and [*json.loads(call.function.arguments)] == ["place"]
    chunks = [*litellm.completion(**body, stream=True)]
    [streamed] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"}
    after = body | {"messages": [*user(WARM), message, result], "tool_choice": "none"}
    assert litellm.completion(**after).choices[0].message.content


def test_an_effort_is_no_obstacle(url: str) -> None:
    """Its users turn it on for all models at once."""
    body = given("hosted_vllm", url, messages=user(QUESTION), reasoning_effort="low")
    assert litellm.completion(**body).choices[0].message.content


def test_its_responses_are_answered(url: str) -> None:
    body = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "input": QUESTION}
    whole = litellm.responses(**body, temperature=0, max_output_tokens=12)
    events = [*litellm.responses(**body, temperature=0, max_output_tokens=12, stream=True)]
    assert events[-1].response.output_text == whole.output_text != ""


def test_its_provider_of_anthropic_is_answered(fleet: Fleet) -> None:
    """By /v1/messages: a chat whole and streamed, and a forced call."""
    own: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": fleet.base_url, "api_key": "none"}
    own |= {"max_tokens": 60, "temperature": 0}
    whole = litellm.completion(**own, messages=user(QUESTION))
    chunks = [*litellm.completion(**own, messages=user(QUESTION), stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text and whole.usage.completion_tokens > 0
    called = litellm.completion(**own, messages=user(WARM), tools=[WARM_TOOL], tool_choice="required")
    [call] = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and called.choices[0].finish_reason == "tool_calls"
