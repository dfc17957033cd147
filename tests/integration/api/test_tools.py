"""Calls of tools and reasoning on /v1/chat/completions, and structured output from every API, in every shape
of its field.
"""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from api.answers.call_formats import CALL_FORMATS, find_call_format, json_list
from api.grammar.compile import ANY_OBJECT, Grammar, compile_checked
from api.grammar.force import compile_calls
from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT, CHAT_PATH, frames, streamed
from tests.support.deep_grammars import SCHEMA as SCHEMA_OF_MANY
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.jobs import Service
from tests.support.tokenizer import TOKENIZER, ids

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "get_time"}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"place": "Zürich 🙂"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = ['{"place": "Zürich 🙂"}', "{}"]
HERMES: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Return the only choice of an answer."""
    response = await client.post(CHAT_PATH, json=CHAT | {"tools": TOOLS} | fields)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return dict(choice)


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and arguments of each call."""
    functions = [call["function"] for call in message["tool_calls"]]
    return [(one["name"], one["arguments"]) for one in functions]


async def test_calls_are_apart_from_content(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (_, _, client):
        choice = await ask(client)
        only_calls = await ask(client, messages=[{"role": "user", "content": "Again"}], stop="nowhere")
        without = await ask(client, tool_choice="none")
        named = await ask(client, tool_choice=TOOLS[0] | {"function": {"name": "get_weather"}})
        one = await ask(client, parallel_tool_calls=False)
    message, reasons = choice["message"], (choice["finish_reason"], named["finish_reason"])
    assert (message["content"], *reasons) == ("Let me see.", "tool_calls", "stop")
    assert named["message"]["tool_calls"] and named["finish_reason"] == "stop", (
        "it is an answer like any other"
    )
    assert called(message) == list(zip(["get_weather", "get_time"], ARGUMENTS, strict=True))
    call_ids = [call["id"] for call in (*message["tool_calls"], *only_calls["message"]["tool_calls"])]
    assert len(set(call_ids)) == 4 and all(call_id.startswith("call_") for call_id in call_ids)
    assert without["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
    assert called(one["message"]) == [("get_weather", ARGUMENTS[0])]


async def test_a_call_that_a_stop_string_cuts_is_not_to_be_run(broker: Broker) -> None:
    """Whole and streamed; a stop string after the arguments does not cut the call."""
    cases = [("Zürich", "stop"), ("🙂", "stop"), ("}", "stop"), ("\n</tool_call>", "tool_calls")]
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (_, _, client):
        for text, reason in cases:
            choice = await ask(client, stop=[text])
            found = frames(await streamed(client, CHAT_PATH, CHAT | {"tools": TOOLS, "stop": [text]}))
            older = await ask(client, tools=None, functions=[TOOLS[0]["function"]], stop=[text])
            assert choice["finish_reason"] == found[-1]["choices"][0]["finish_reason"] == reason
            assert (choice["stop_reason"], older["finish_reason"]) == (
                text,
                reason.replace("tool_calls", "function_call"),
            )


async def test_a_call_that_a_failure_cuts_has_no_reason(broker: Broker) -> None:
    """As at its deadline, or when it is cancelled."""
    cut = CALLS[: CALLS.index("rich")]
    async with answering(broker.url, Answer(ids(cut), error="forward"), **HERMES) as (_, _, client):
        whole = await client.post(CHAT_PATH, json=CHAT | {"tools": TOOLS})
        *shown, last = frames(await streamed(client, CHAT_PATH, CHAT | {"tools": TOOLS}))
    assert whole.status_code == 500 and "choices" not in whole.json()
    assert "error" in last and {frame["choices"][0]["finish_reason"] for frame in shown} == {None}


async def test_a_format_is_one_row(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of CONTRIBUTING.md: a row's calls are found in a template, read, and forced."""
    toy = json_list("toy", "<toy>", "</toy>")
    monkeypatch.setitem(CALL_FORMATS, "toy", toy)
    assert find_call_format("{{ tools }} <toy>[]</toy>", lambda _: None) == toy
    answer = Answer(ids('<toy>[{"name": "get_time", "arguments": {}}]</toy>'))
    async with answering(broker.url, answer, tool_call_parser="toy") as (_, _, client):
        assert called((await ask(client))["message"]) == [("get_time", "{}")]
    assert "<toy>" in compile_calls("toy", '[["get_time", {}]]', (), is_required=True, is_parallel=True)


async def test_content_is_null_if_the_answer_has_only_calls(broker: Broker) -> None:
    answer = Answer(ids(CALLS.removeprefix("Let me see.\n")))
    async with answering(broker.url, answer, **HERMES) as (_, _, client):
        assert (await ask(client))["message"]["content"] is None


async def test_calls_are_streamed_name_first_then_arguments_in_pieces(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (_, _, client):
        found = frames(await streamed(client, CHAT_PATH, CHAT | {"tools": TOOLS}))
    deltas = [frame["choices"][0]["delta"] for frame in found]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for index, name in enumerate(("get_weather", "get_time")):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert (first["type"], first["function"]) == ("function", {"name": name, "arguments": ""})
        assert all(piece.keys() == {"index", "function"} for piece in rest)
        assert "".join(piece["function"]["arguments"] for piece in rest) == ARGUMENTS[index]
    assert len(pieces) > 8, "arguments come in pieces"
    assert all(deltas[:-1]) and deltas[-1] == {}, "a chunk that says nothing is not sent"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_adds_up_to_the_whole_answer(broker: Broker) -> None:
    """OpenAI's own package adds it up."""
    answer = Answer(ids("<think>\nHm, 7.\n</think>\n\n" + CALLS))
    async with answering(broker.url, answer, **HERMES) as (_, _, client):
        whole = (await ask(client))["message"]
        own = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
        body: Any = CHAT | {"tools": strict, "model": "tgi"}  # before version 3 it reads only such
        async with own, own.chat.completions.stream(**body) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
    assert message.content == whole["content"]
    assert called(message.model_dump()) == called(whole)
    extra = message.model_extra or {}
    assert extra["reasoning_content"] == whole["reasoning_content"] == whole["reasoning"] == "Hm, 7."


async def test_the_older_fields_get_the_older_shape(broker: Broker) -> None:
    older = {"tools": None, "functions": [tool["function"] for tool in TOOLS]}
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (_, _, client):
        choice = await ask(client, **older)
        found = frames(await streamed(client, CHAT_PATH, CHAT | older))
    function = {"name": "get_weather", "arguments": ARGUMENTS[0]}
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (function, "function_call")
    pieces = [frame["choices"][0]["delta"].get("function_call", {}) for frame in found]
    assert "".join(piece.get("arguments", "") for piece in pieces) == ARGUMENTS[0]
    assert found[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_reasoning_is_apart_from_content(broker: Broker) -> None:
    thought = "<think>\nSeven is odd.\n</think>\n\nIt is odd."
    async with answering(broker.url, Answer(ids(thought)), **HERMES) as (_, _, client):
        fields: dict[str, Any] = {"tools": None, "stream_options": {"include_usage": True}}
        message = (await ask(client, tools=None))["message"]
        hidden = (await ask(client, tools=None, include_reasoning=False))["message"]
        found = frames(await streamed(client, CHAT_PATH, CHAT | fields))
        cut = await ask(client, tools=None, max_tokens=4)
    assert (message["content"], message["reasoning_content"]) == ("It is odd.", "Seven is odd.")
    assert hidden == {"role": "assistant", "content": "It is odd.", "refusal": None}
    deltas = [frame["choices"][0]["delta"] for frame in found[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Seven is odd."
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is odd."
    num_tokens = found[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len(ids(thought)) - len(ids("It is odd.")), "marks count, too"
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == ""


async def test_history_with_calls_is_in_the_prompt(broker: Broker) -> None:
    """LangChain and the older API write it this way. The template of this model knows no tools."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    newer = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "one"}]},
    ]
    older = [
        newer[0],
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "f", "content": "one"},
    ]
    async with answering(broker.url, Answer(ids("x")), **HERMES) as (worker, _, client):
        for messages in (newer, older):
            await ask(client, messages=messages, tools=None)
        await ask(client)
    prompts = [TOKENIZER.decode(unpack_ids(one.prompt_ids), skip_special_tokens=False) for one in worker.seen]
    assert prompts[0] == prompts[1]
    assert (
        '<|im_start|>assistant\n{"name": "f", "parameters": {"a": 1}}<|im_end|>\n'
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    ) in prompts[0]
    text = prompts[2].removeprefix("<|im_start|>system\n").partition("<|im_end|>\n<|im_start|>user\nHi")[0]
    tools, _, tool_prompt = text.partition("\n")
    assert json.loads(tools)[0] == TOOLS[0] and tool_prompt.startswith("Given the functions available")


OBJECT: Any = {"response_format": {"type": "json_object"}}
VLLM: Any = {"structured_outputs": {"json_object": True}}
SCHEMA = {"type": "object"}
TGI: Any = {"inputs": "a", "parameters": {"grammar": {"type": "json_object", "value": SCHEMA}}}
COMPLETION = {"prompt": "a"}
JSON_BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT | OBJECT),
    ("/v1/chat/completions", CHAT | VLLM),
    ("/v1/completions", COMPLETION | OBJECT),
    ("/v1/completions", COMPLETION | VLLM),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}),
    ("/generate", TGI),
    ("/", TGI),
    ("/invocations", CHAT | OBJECT),
]
JOBS: list[Any] = [
    TGI,
    {**CHAT, "parameters": OBJECT},
    {**CHAT, "parameters": VLLM},
]


@pytest.fixture
def service(redis: Redis) -> Service:
    return Service(redis)


async def test_any_json_object_can_be_requested_in_every_api(broker: Broker, service: Service) -> None:
    expected = compile_checked(Grammar("json", ANY_OBJECT, "f"))
    async with answering(broker.url, Answer(ids("{}"))) as (worker, _, client):
        for path, body in JSON_BODIES:
            answer = await client.post(path, json={"model": "default"} | body if "/v1" in path else body)
            assert answer.status_code == 200, (path, answer.text)
        for i, job in enumerate(JOBS):
            await service.submit(id=f"j{i}", **job)
            assert "error" not in await service.result(f"j{i}")
    assert len(worker.seen) == len(JSON_BODIES) + len(JOBS)
    assert {one.sampling.grammar if one.sampling else "" for one in worker.seen} == {expected}


async def test_definitions_that_lead_deep_end_no_gateway(broker: Broker, service: Service) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_OF_MANY}}
    first = {"type": "object", "properties": {"x": {"$ref": SCHEMA_OF_MANY["$ref"]}}}
    tool = {"name": "f", "parameters": first | {"$defs": SCHEMA_OF_MANY["$defs"]}}
    tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    message = {"name": "f", "input_schema": tool["parameters"]}
    grammar = {"grammar": {"type": "json", "value": SCHEMA_OF_MANY}}
    bodies: list[tuple[str, Any]] = [
        (CHAT_PATH, CHAT | {"response_format": form}),
        (CHAT_PATH, CHAT | tools),
        ("/v1/completions", COMPLETION | {"response_format": form}),
        ("/v1/responses", {"input": "a", "text": {"format": {**form, **form["json_schema"]}}}),
        ("/v1/messages", {**CHAT, "max_tokens": 9, "tools": [message], "tool_choice": {"type": "any"}}),
        ("/generate", {"inputs": "a", "parameters": grammar}),
    ]
    async with answering(broker.url, Answer(ids("{}"))) as (worker, _, client):
        for path, body in bodies:
            answer = await client.post(path, json={"model": "default"} | body if "/v1" in path else body)
            is_shown = "tools" in body  # the prompt has them, and is too long
            assert (answer.status_code, "1023 tokens" in answer.text) == (
                (400, True) if is_shown else (200, False)
            )
        for i, job in enumerate([{"inputs": "a", "parameters": grammar}, {**CHAT, "parameters": tools}]):
            await service.submit(id=f"j{i}", **job)
            assert ("1023 tokens" in str(await service.result(f"j{i}"))) == (i == 1)
    assert len(worker.seen) == 5


WHOLE = '{"a": [1]}'
INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
AT_THE_LIMIT: list[tuple[str, dict[str, Any], str]] = [
    (WHOLE, OBJECT, "stop"),
    (WHOLE + " ", VLLM, "stop"),
    (WHOLE[:-1], OBJECT, "length"),
    (WHOLE, {"structured_outputs": {"regex": ".*"}}, "length"),
    (WHOLE, {}, "length"),
    ("12", {"response_format": INTEGER}, "length"),
]


@pytest.mark.parametrize(("text", "fields", "reason"), AT_THE_LIMIT)
async def test_a_complete_json_ends_with_stop_even_at_max_tokens(
    broker: Broker, text: str, fields: dict[str, Any], reason: str
) -> None:
    answer, tool = Answer(ids(text), ends=False), {"type": "function", "function": {"name": "f"}}
    limit = {"max_tokens": len(answer.ids)}
    async with answering(broker.url, answer) as (_, _, client):
        for path, body in (
            (CHAT_PATH, CHAT),
            (CHAT_PATH, CHAT | {"tools": [tool]}),
            ("/v1/completions", {"model": "default", **COMPLETION}),
        ):
            whole = (await client.post(path, json=body | fields | limit)).json()
            *_, last = frames(await streamed(client, path, body | fields | limit))
            assert whole["choices"][0]["finish_reason"] == last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("text", "status"), [(WHOLE, "completed"), (WHOLE[:-1], "incomplete")])
async def test_a_response_with_a_complete_json_is_completed(broker: Broker, text: str, status: str) -> None:
    answer = Answer(ids(text), ends=False)
    body = {"model": "default", "input": "a", "text": {"format": {"type": "json_object"}}}
    async with answering(broker.url, answer) as (_, _, client):
        found = await client.post("/v1/responses", json=body | {"max_output_tokens": len(answer.ids)})
        assert found.json()["status"] == status
