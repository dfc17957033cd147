"""langchain-openai: the chat model, the older completion model, and structured output by each method."""

from typing import Any

import pytest

from tests.support.clients.questions import ABOUT_BOB, MODEL, QUESTION, TOO_LONG, WARM, WARM_TOOL, Person

langchain_openai: Any = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.slow


@pytest.fixture
def chat(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=url,
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=80,
        max_retries=0,
        stream_usage=True,
    )


def test_invoke_stream_and_batch_give_one_text(chat: Any) -> None:
    whole = chat.invoke(QUESTION)
    assert whole.content == "".join(chunk.content for chunk in chat.stream(QUESTION))
    assert whole.usage_metadata["output_tokens"] > 0
    assert [answer.content for answer in chat.batch([QUESTION, QUESTION])] == [whole.content] * 2


async def test_async_stream_has_usage(chat: Any) -> None:
    chunks = [chunk async for chunk in chat.astream(QUESTION)]
    total = sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)
    assert total == (await chat.ainvoke(QUESTION)).usage_metadata["output_tokens"]


@pytest.mark.parametrize("method", [None, "json_schema", "json_mode"])
def test_structured_output_is_an_object_of_its_class(chat: Any, method: str | None) -> None:
    typed = chat.with_structured_output(Person, **({"method": method} if method else {}))
    found = typed.invoke(ABOUT_BOB)
    assert isinstance(found, Person) and found.name == "Bob"


def test_a_chat_with_a_history_and_logprobs(chat: Any) -> None:
    history = [("system", "Be brief."), ("human", "Hi"), ("ai", "Hello."), ("human", QUESTION)]
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(history)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_too_long_a_prompt_is_its_own_exception(chat: Any) -> None:
    overflow = pytest.importorskip("langchain_core.exceptions").ContextOverflowError
    with pytest.raises(overflow):
        chat.invoke(TOO_LONG)


def test_the_older_model_takes_many_prompts(url: str) -> None:
    """It sends them in one request, with `best_of`."""
    older = langchain_openai.OpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0.5, max_tokens=4, n=2, best_of=2
    )
    result = older.generate([f"{i}, {i + 1}," for i in range(6)])
    assert [len(choices) for choices in result.generations] == [2] * 6


def test_a_tool_is_called_and_its_result_is_answered(chat: Any) -> None:
    messages: Any = pytest.importorskip("langchain_core.messages")
    bound = chat.bind_tools([WARM_TOOL], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(WARM)
    [call] = answer.tool_calls
    assert call["name"] == "get_weather" and [*call["args"]] == ["place"] and not answer.invalid_tool_calls
    first, *others = bound.stream(WARM)
    assert sum(others, first).tool_calls[0]["args"] == call["args"]
    result = messages.ToolMessage("31 degrees", tool_call_id=call["id"])
    history = [messages.HumanMessage(WARM), answer, result]
    assert chat.bind_tools([WARM_TOOL], tool_choice="none").invoke(history).content


def test_structured_output_by_calling_a_function(chat: Any) -> None:
    typed = chat.with_structured_output(Person, method="function_calling", include_raw=True)
    found = typed.invoke(ABOUT_BOB)
    assert isinstance(found["parsed"], Person), found


def test_responses_and_an_effort_are_answered(url: str) -> None:
    own = {"base_url": url, "api_key": "none", "model": MODEL, "max_tokens": 16, "max_retries": 0}
    by_responses = langchain_openai.ChatOpenAI(**own, use_responses_api=True)
    assert by_responses.invoke(QUESTION).text and "".join(one.text for one in by_responses.stream(QUESTION))
    assert langchain_openai.ChatOpenAI(**own, reasoning_effort="low").invoke(QUESTION).content
