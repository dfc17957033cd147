"""pydantic-ai: agents that answer in text and in classes, with a history, whole and streamed."""

from typing import Any

import pytest

from tests.support.clients.questions import ABOUT_BOB, MODEL, QUESTION, Person

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


async def test_a_class_as_output(model: Any) -> None:
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
