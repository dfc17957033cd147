"""litellm, langchain-openai, pydantic-ai, instructor and `llm`: each asks for a text whole and streamed, for
an object of a class, and for a call whose result it sends back, in its own way.

anthropic: messages whole and streamed, tools in a loop, counted tokens, and refusals as its exceptions.
huggingface_hub: text generation and chats, whole and streamed, with the URL as the model.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.support.clients.questions import (
    ABOUT_BOB,
    MODEL,
    QUESTION,
    TOO_LONG,
    WARM,
    WARM_SCHEMA,
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


# --- anthropic ----------------------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "Weather of a place", "input_schema": WARM_SCHEMA}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic")


@pytest.fixture
def client(anthropic: Any, fleet: Fleet) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=fleet.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_the_same_streamed_and_whole(client: Any) -> None:
    whole = client.messages.create(**ASKED, messages=user(QUESTION), system="Be brief.")
    with client.messages.stream(**ASKED, messages=user(QUESTION), system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    total = final.usage.input_tokens + final.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=user(QUESTION), system="Be brief.")
    assert final.usage.cache_read_input_tokens > 0 and counted.input_tokens == total
    assert whole._request_id and whole.id == f"msg_{whole._request_id}"


def test_a_call_of_a_tool_and_its_result(client: Any) -> None:
    first = client.messages.create(**ASKED, **FORCED, messages=user(WARM))
    with client.messages.stream(**ASKED, **FORCED, messages=user(WARM)) as stream:
        streamed = stream.get_final_message()
    [call] = first.content
    assert (first.stop_reason, call.name) == ("tool_use", "get_weather") and set(call.input) == {"place"}
    assert streamed.content[0].input == call.input and streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31 degrees"}
    turns = [
        *user(WARM),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**ASKED, messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert last.content[0].text and last.stop_reason in ("end_turn", "max_tokens")


def test_its_tool_runner_comes_to_an_end(anthropic: Any, client: Any) -> None:
    """Whether the model calls the tool is its own affair."""

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(place: str) -> str:
        """Weather of a place."""
        return f"31 degrees in {place}"

    runner = client.beta.messages.tool_runner(
        **ASKED, messages=user(WARM), tools=[get_weather], max_iterations=3
    )
    assert runner.until_done().role == "assistant"


def test_refusals_are_its_exceptions(anthropic: Any, client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(**ASKED, messages=user(TOO_LONG))
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**ASKED, messages=user(QUESTION), stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**(ASKED | {"model": "other"}), messages=user(QUESTION))


async def test_its_asynchronous_client(anthropic: Any, fleet: Fleet) -> None:
    async with anthropic.AsyncAnthropic(base_url=fleet.base_url, auth_token="none") as client:
        events = [
            one async for one in await client.messages.create(**ASKED, messages=user("Hi"), stream=True)
        ]
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


# --- huggingface hub ----------------------------------------------------------------------------------------

PROMPT = "The capital of France is"


@pytest.fixture
def hub_client(fleet: Fleet) -> InferenceClient:
    return InferenceClient(fleet.base_url, timeout=300)


def test_text_generation_is_the_same_streamed_and_whole(hub_client: InferenceClient) -> None:
    """The whole has the prompt before it unless `return_full_text` is false, as with TGI."""
    whole = hub_client.text_generation(PROMPT, max_new_tokens=8, details=True, return_full_text=False)
    assert PROMPT in hub_client.text_generation(PROMPT, max_new_tokens=8)
    tokens = hub_client.text_generation(PROMPT, max_new_tokens=8, stream=True)
    assert "".join(tokens) == whole.generated_text and "Paris" in whole.generated_text
    assert whole.details is not None and whole.details.generated_tokens == 8
    assert hub_client.text_generation(PROMPT, max_new_tokens=8, watermark=True)


def test_a_chat_is_the_same_streamed_and_whole(hub_client: InferenceClient) -> None:
    body: dict[str, Any] = {"messages": user(QUESTION), "temperature": 0, "max_tokens": 12}
    whole = hub_client.chat_completion(**body).choices[0].message.content
    chunks = hub_client.chat_completion(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_json_schema_is_kept_to(hub_client: InferenceClient) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    answer = hub_client.chat_completion(user(ABOUT_BOB), temperature=0, max_tokens=80, response_format=schema)
    assert Person.model_validate_json(answer.choices[0].message.content or "")


async def test_an_async_chat_has_as_many_tokens_as_asked_for(fleet: Fleet) -> None:
    async with AsyncInferenceClient(fleet.base_url, timeout=300) as hub_client:
        answer = await hub_client.chat_completion(user(QUESTION), max_tokens=4)
        assert answer.usage.completion_tokens == 4


def test_a_tool_is_called_and_its_result_is_answered(hub_client: InferenceClient) -> None:
    body: dict[str, Any] = {"tools": [WARM_TOOL], "temperature": 0, "max_tokens": 80}
    answer = hub_client.chat_completion(user(WARM), tool_choice="required", **body).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    call = answer.message.tool_calls[0]
    assert call.function.name == "get_weather" and [*json.loads(call.function.arguments)] == ["place"]
    asked = {"role": "assistant", "content": None, "tool_calls": [dict(call)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"}
    after = hub_client.chat_completion([*user(WARM), asked, result], tool_choice="none", **body)
    assert after.choices[0].message.content
