"""pydantic-ai: agents that answer in text and in classes, with a history, whole and streamed."""

from typing import Any

import pytest

from tests.support.clients.questions import ABOUT_BOB, MODEL, QUESTION, WARM, Person

pydantic_ai: Any = pytest.importorskip("pydantic_ai")
models: Any = pytest.importorskip("pydantic_ai.models.openai")
providers: Any = pytest.importorskip("pydantic_ai.providers.openai")
pytestmark = pytest.mark.slow
SETTINGS = {"max_tokens": 80, "temperature": 0, "seed": 1}


@pytest.fixture
def model(url: str) -> Any:
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    return models.OpenAIChatModel(MODEL, provider=provider)


def agent(model: Any, **more: Any) -> Any:
    return pydantic_ai.Agent(model, model_settings=SETTINGS, **more)


async def test_a_run_is_the_same_streamed_and_whole(model: Any) -> None:
    whole = await agent(model).run(QUESTION)
    async with agent(model).run_stream(QUESTION) as run:
        assert "".join([text async for text in run.stream_text(delta=True)]) == whole.output


async def test_a_class_as_output_is_filled(model: Any) -> None:
    native = agent(model, output_type=pydantic_ai.NativeOutput(Person))
    assert isinstance((await native.run(ABOUT_BOB)).output, Person)
    async with native.run_stream(ABOUT_BOB) as run:
        *_, last = [found async for found in run.stream_output()]
        assert isinstance(last, Person)


async def test_a_history_is_continued(model: Any) -> None:
    talker = agent(model, system_prompt="Be brief.")
    first = await talker.run("Hi")
    second = await talker.run(QUESTION, message_history=first.all_messages())
    assert len(second.all_messages()) == 4


async def test_a_class_as_output_by_its_default_which_is_a_tool(model: Any) -> None:
    found = await agent(model, output_type=Person).run(ABOUT_BOB)
    assert isinstance(found.output, Person)
    async with agent(model, output_type=Person).run_stream(ABOUT_BOB) as run:
        assert isinstance(await run.get_output(), Person)


async def test_an_agent_with_a_tool_and_an_effort(model: Any) -> None:
    """Whether it calls the tool is the model's affair; a run comes to its end in both cases."""
    talker = agent(model)

    @talker.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(place: str) -> str:
        """Weather of a place."""
        return f"31 degrees in {place}"

    limits = pydantic_ai.UsageLimits(request_limit=4)
    settings = SETTINGS | {"openai_reasoning_effort": "low"}
    assert (await talker.run(WARM, usage_limits=limits, model_settings=settings)).output is not None


async def test_its_responses_model_is_answered(url: str) -> None:
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    found = await agent(models.OpenAIResponsesModel(MODEL, provider=provider)).run(QUESTION)
    assert found.output
