"""huggingface_hub: text generation and chats, whole and streamed, with the URL as the model."""

import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.support.clients.questions import ABOUT_BOB, QUESTION, WARM, WARM_TOOL, Person, user
from tests.support.fleet.fleet import Fleet

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"


@pytest.fixture
def client(fleet: Fleet) -> InferenceClient:
    return InferenceClient(fleet.base_url, timeout=300)


def test_text_generation_is_the_same_streamed_and_whole(client: InferenceClient) -> None:
    """The whole has the prompt before it unless `return_full_text` is false, as with TGI."""
    whole = client.text_generation(PROMPT, max_new_tokens=8, details=True, return_full_text=False)
    assert PROMPT in client.text_generation(PROMPT, max_new_tokens=8)
    tokens = client.text_generation(PROMPT, max_new_tokens=8, stream=True)
    assert "".join(tokens) == whole.generated_text and "Paris" in whole.generated_text
    assert whole.details is not None and whole.details.generated_tokens == 8


def test_a_chat_is_the_same_streamed_and_whole(client: InferenceClient) -> None:
    body: dict[str, Any] = {"messages": user(QUESTION), "temperature": 0, "max_tokens": 12}
    whole = client.chat_completion(**body).choices[0].message.content
    chunks = client.chat_completion(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_json_schema_is_kept_to(client: InferenceClient) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    answer = client.chat_completion(user(ABOUT_BOB), temperature=0, max_tokens=80, response_format=schema)
    assert Person.model_validate_json(answer.choices[0].message.content or "")


async def test_an_async_chat_has_as_many_tokens_as_asked_for(fleet: Fleet) -> None:
    async with AsyncInferenceClient(fleet.base_url, timeout=300) as client:
        answer = await client.chat_completion(user(QUESTION), max_tokens=4)
        assert answer.usage.completion_tokens == 4


def test_a_tool_is_called_and_its_result_is_answered(client: InferenceClient) -> None:
    body: dict[str, Any] = {"tools": [WARM_TOOL], "temperature": 0, "max_tokens": 80}
    answer = client.chat_completion(user(WARM), tool_choice="required", **body).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather" and [*json.loads(call.function.arguments)] == ["place"]
    asked = {"role": "assistant", "content": None, "tool_calls": [dict(call)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"}
    after = client.chat_completion([*user(WARM), asked, result], tool_choice="none", **body)
    assert after.choices[0].message.content


def test_a_watermark_and_details_are_answered(client: InferenceClient) -> None:
    marked = client.text_generation(PROMPT, max_new_tokens=8, watermark=True, details=True)
    assert marked.details is not None and marked.details.generated_tokens == 8
