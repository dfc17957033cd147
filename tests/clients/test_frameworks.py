"""litellm, langchain-openai, pydantic-ai, instructor and `llm`: each asks for a text whole and streamed, for
an object of a class, and for a call whose result it sends back, in its own way.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
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

pytestmark = pytest.mark.slow
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm asks the Internet at its import

# --- litellm ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm() -> Any:
    return pytest.importorskip("litellm")


def given(provider: str, url: str, **more: Any) -> dict[str, Any]:
    about = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none"}
    return about | {"temperature": 0, "max_tokens": 80, "messages": user(QUESTION)} | more


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(litellm: Any, provider: str, url: str, fleet: Fleet) -> None:
    body = given(provider, fleet.base_url if provider == "anthropic" else url)
    whole, chunks = litellm.completion(**body), [*litellm.completion(**body, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != "" and whole.usage.completion_tokens > 0
    calling = body | {"messages": user(WARM), "tools": [WARM_TOOL], "tool_choice": "required"}
    calling["parallel_tool_calls"] = False
    message = litellm.completion(**calling).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather" and [*json.loads(call.function.arguments)] == ["place"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"}
    after = calling | {"messages": [*user(WARM), message, result], "tool_choice": "none"}
    assert litellm.completion(**after).choices[0].message.content


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_gets_objects_and_its_own_exception_for_too_long_a_prompt(
    litellm: Any, provider: str, url: str
) -> None:
    """By the exception callers trim the chat, or fall back to another model."""
    answer = litellm.completion(**given(provider, url, messages=user(ABOUT_BOB), response_format=Person))
    assert Person.model_validate_json(answer.choices[0].message.content).age <= 120
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**given(provider, url, messages=user(TOO_LONG)))


def test_litellm_of_other_routes(litellm: Any, url: str, fleet: Fleet) -> None:
    """TGI's own, completions of many prompts, and responses."""
    tgi = given("huggingface", fleet.base_url) | {"model": "huggingface/tgi"}
    assert litellm.completion(**tgi).choices[0].message.content
    body = given("text-completion-openai", url, prompt=[f"{i}, {i + 1}," for i in range(8)], max_tokens=3)
    del body["messages"]
    assert len(litellm.text_completion(**body).choices) == 8
    body = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "input": QUESTION}
    body |= {"temperature": 0, "max_output_tokens": 12}
    whole, events = litellm.responses(**body), [*litellm.responses(**body, stream=True)]
    assert events[-1].response.output_text == whole.output_text != ""


# --- langchain-openai ---------------------------------------------------------------------------------------


@pytest.fixture
def chat(url: str) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    own = {"base_url": url, "api_key": "none", "model": MODEL, "max_retries": 0, "stream_usage": True}
    return langchain.ChatOpenAI(**own, temperature=0, max_tokens=80)


def test_langchain(chat: Any) -> None:
    whole, chunks = chat.invoke(QUESTION), [*chat.stream(QUESTION)]
    assert whole.content == "".join(chunk.content for chunk in chunks)
    used = sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)
    assert whole.usage_metadata["output_tokens"] == used > 0
    bound = chat.bind_tools([WARM_TOOL], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(WARM)
    [call] = answer.tool_calls
    assert call["name"] == "get_weather" and [*call["args"]] == ["place"] and not answer.invalid_tool_calls
    first, *others = bound.stream(WARM)
    assert sum(others, first).tool_calls[0]["args"] == call["args"]
    messages: Any = pytest.importorskip("langchain_core.messages")
    result = messages.ToolMessage("31 degrees", tool_call_id=call["id"])
    history = [messages.HumanMessage(WARM), answer, result]
    assert chat.bind_tools([WARM_TOOL], tool_choice="none").invoke(history).content
    with pytest.raises(pytest.importorskip("langchain_core.exceptions").ContextOverflowError):
        chat.invoke(TOO_LONG)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_langchain_gets_objects(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Person, method=method).invoke(ABOUT_BOB), Person)


def test_langchain_of_other_routes(url: str) -> None:
    """Its older model sends many prompts in one request, with `best_of`; its chats can ask for responses."""
    langchain = pytest.importorskip("langchain_openai")
    own = {"base_url": url, "api_key": "none", "model": MODEL}
    older = langchain.OpenAI(**own, temperature=0.5, max_tokens=4, n=2, best_of=2)
    result = older.generate([f"{i}, {i + 1}," for i in range(6)])
    assert [len(choices) for choices in result.generations] == [2] * 6
    by_responses = langchain.ChatOpenAI(**own, max_tokens=16, use_responses_api=True)
    assert by_responses.invoke(QUESTION).text and "".join(one.text for one in by_responses.stream(QUESTION))


# --- pydantic-ai --------------------------------------------------------------------------------------------


async def test_pydantic_ai(url: str) -> None:
    """Whether it calls the tool is the model's affair; a run comes to its end in both cases."""
    pydantic_ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    settings = {"max_tokens": 80, "temperature": 0, "seed": 1}

    def agent(kind: Any = models.OpenAIChatModel, **more: Any) -> Any:
        return pydantic_ai.Agent(kind(MODEL, provider=provider), model_settings=settings, **more)

    whole = await agent().run(QUESTION)
    async with agent().run_stream(QUESTION) as run:
        assert "".join([text async for text in run.stream_text(delta=True)]) == whole.output
    second = await agent().run("Why?", message_history=whole.all_messages())
    assert len(second.all_messages()) == 4
    for output in (pydantic_ai.NativeOutput(Person), Person):
        assert isinstance((await agent(output_type=output).run(ABOUT_BOB)).output, Person)
        async with agent(output_type=output).run_stream(ABOUT_BOB) as run:
            assert isinstance(await run.get_output(), Person)
    talker = agent()

    @talker.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(place: str) -> str:
        """Weather of a place."""
        return f"31 degrees in {place}"

    limits = pydantic_ai.UsageLimits(request_limit=4)
    assert (await talker.run(WARM, usage_limits=limits)).output is not None
    assert (await agent(models.OpenAIResponsesModel).run(QUESTION)).output


# --- instructor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS"])
def test_instructor(url: str, mode: str) -> None:
    """An object of a class, whole and in parts."""
    instructor: Any = pytest.importorskip("instructor")
    own = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(own, mode=instructor.Mode[mode])
    common: dict[str, Any] = {"model": MODEL, "response_model": Person}
    if mode == "RESPONSES_TOOLS":
        found = client.responses.create(**common, input=ABOUT_BOB, max_output_tokens=100, max_retries=0)
    else:
        body = common | {"messages": user(ABOUT_BOB), "max_tokens": 100, "temperature": 0}
        found = client.chat.completions.create(**body, max_retries=0)
        *_, last = client.chat.completions.create_partial(**body)
        assert last.name is not None
    assert isinstance(found, Person)


# --- llm ----------------------------------------------------------------------------------------------------

MODELS = """
- {{model_id: fleet, model_name: {model}, api_base: "{url}", supports_schema: true, supports_tools: true}}
- {{model_id: older, model_name: {model}, api_base: "{url}", completion: true}}
"""


def test_llm(url: str, tmp_path: Path) -> None:
    """The command line, with a model of extra-openai-models.yaml, as its documentation shows."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=url))

    def ask(model: str, num_tokens: int, *words: str) -> str:
        own = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}
        options = ("-m", model, "-o", "temperature", "0", "-o", "max_tokens", str(num_tokens))
        command = [sys.executable, "-m", "llm", *options, *words]
        quiet: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, env=os.environ | own, **quiet)
        assert done.returncode == 0, done.stderr
        return str(done.stdout.strip())

    assert ask("fleet", 12, QUESTION) == ask("fleet", 12, "--no-stream", QUESTION) != ""
    assert ask("fleet", 5, "-c", "And one more?")
    age = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 120}}, "required": ["age"]}
    schema = json.dumps(age | {"additionalProperties": False})
    assert json.loads(ask("fleet", 200, "--schema", schema, "Bob is 32")).keys() == {"age"}
    assert "Paris" in ask("older", 5, "The capital of France is")
    function = "def get_weather(place: str) -> str:\n    'Weather of a place'\n    return '31 degrees'"
    assert ask("fleet", 60, "--functions", function, "--chain-limit", "3", WARM) is not None
