"""Calls of functions and reasoning of responses, whole and as events, and as input of the next one."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.openai.test_tools import ARGUMENTS, CALLS, HERMES, PARAMETERS
from tests.support.answers.openai_frames import streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.responses.events import BODY, PATH, check_response, read_events, text_of
from tests.support.tokenizer import TOKENIZER, ids

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
    {"type": "function", "name": "get_time"},
]
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "namespace",
        "name": "mcp__files",
        "description": "",
        "tools": [{"type": "function", "name": "read"}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": ""},
    },
]
ASKED = BODY | {"tools": TOOLS}
THOUGHT = "<think>\nHm, 7.\n</think>\n\n"


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=ASKED | fields)
    content: dict[str, Any] = response.json()
    assert response.status_code == 200, content
    check_response(content)
    return content


async def test_reasoning_text_and_calls_are_items_of_their_own(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(THOUGHT + CALLS)), **HERMES) as (_, _, client):
        whole = await ask(client)
        events = read_events(await streamed(client, PATH, ASKED))
        stored = (await client.get(f"{PATH}/{events[0]['response']['id']}")).json()
        one = await ask(client, parallel_tool_calls=False)
        none = await ask(client, tool_choice="none", tools=TOOLS[:1])
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    thought, message, *calls = whole["output"]
    assert [part["text"] for part in thought["content"]] == ["Hm, 7."] and thought["summary"] == []
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", ARGUMENTS[0]),
        ("get_time", ARGUMENTS[1]),
    ]
    assert len({call["call_id"] for call in calls}) == 2 and whole["tools"] == TOOLS
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    last = events[-1]["response"]
    assert stored == last
    assert [item["type"] for item in last["output"]] == kinds and text_of(events) == "Let me see."
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"] and {item["status"] for item in done} == {"completed"}
    for i, arguments in enumerate(ARGUMENTS, 2):
        own = [event for event in events if event.get("output_index") == i]
        deltas = [one["delta"] for one in own if one["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == arguments == own[-2]["arguments"]
        assert own[0]["item"]["name"] and own[0]["item"]["arguments"] == ""
    assert [item["type"] for item in one["output"]] == kinds[:3]
    assert [item["type"] for item in none["output"]] == kinds[:2]


@pytest.mark.parametrize("tail", ["", '{"place": "Z'])
async def test_a_call_that_is_cut_is_incomplete_and_never_done(broker: Broker, tail: str) -> None:
    """Here the model ends within the call, as it does at a stop string of another API."""
    text = CALLS[: CALLS.rindex("{}")] + tail
    async with answering(broker.url, Answer(ids(text)), **HERMES) as (_, _, client):
        whole = await ask(client)
        events = read_events(await streamed(client, PATH, ASKED))
    last = events[-1]["response"]
    for response in (whole, last):
        statuses = [item["status"] for item in response["output"]]
        expected = ["completed", "completed", "incomplete"] if tail else ["completed", "completed"]
        assert statuses[: len(expected)] == expected
        assert response["status"] == ("incomplete" if tail else "completed")
    done = [one for one in events if one["type"] == "response.function_call_arguments.done"]
    assert [one["arguments"] for one in done] == ARGUMENTS[:1]


async def test_reasoning_is_its_own_summary_if_one_is_requested(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(THOUGHT + "Odd.")), **HERMES) as (_, _, client):
        events = read_events(await streamed(client, PATH, BODY | {"reasoning": {"summary": "auto"}}))
    thought, message = events[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm, 7."}] and thought["content"] == []
    deltas = [one["delta"] for one in events if one["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "Hm, 7." and message["content"][0]["text"] == "Odd."


async def test_calls_and_their_outputs_are_in_the_next_prompt(broker: Broker) -> None:
    """The prompt is the same whether they are given by the id of the response, by repeated items, or by
    references.
    """
    async with answering(broker.url, Answer(ids(THOUGHT + CALLS)), **HERMES) as (worker, _, client):
        first = await ask(client)
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "fine"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        question = {"role": "user", "content": BODY["input"]}
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        await ask(client, input=outputs, previous_response_id=first["id"])
        await ask(client, input=[question, *first["output"], *outputs])
        last = await ask(client, input=[question, *named, *outputs])
        items = (await client.get(f"{PATH}/{last['id']}/input_items")).json()["data"]
    prompts = [TOKENIZER.decode(unpack_ids(one.prompt_ids), skip_special_tokens=False) for one in worker.seen]
    assert prompts[1] == prompts[2] == prompts[3]
    assert prompts[1].count("fine") == 2 and "get_weather" in prompts[1] and "Let me see." in prompts[1]
    assert [item["type"] for item in items] == [
        *["function_call_output"] * 2,
        *["function_call"] * 2,
        "message",
        "reasoning",
        "message",
    ]


async def test_tools_that_no_model_here_can_call_are_left_out(broker: Broker) -> None:
    """The prompt is the same without them, and the answer shows them, as Codex sent them."""
    fields = {
        "tools": [*CODEX_TOOLS, *TOOLS],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "store": False,
        "tool_choice": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "medium", "summary": "auto"},
    }
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (worker, _, client):
        with_them = await ask(client, **fields)
        await ask(client, **(fields | {"tools": TOOLS}))
        await ask(client, **(fields | {"tools": CODEX_TOOLS}))
        listed = (await client.get("/v1/models")).json()
    prompts = [one.prompt_ids for one in worker.seen]
    assert prompts[0] == prompts[1] != prompts[2]
    assert with_them["tools"] == fields["tools"]
    assert [item["type"] for item in with_them["output"]] == ["message", *["function_call"] * 2]
    assert listed["models"] == [] and [one["object"] for one in listed["data"]] == ["model"]


async def test_a_stream_with_calls_adds_up_in_openai_s_package(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(THOUGHT + CALLS)), **HERMES) as (_, _, client):
        own = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        body: Any = ASKED | {"model": "tgi"}
        async with own, own.responses.stream(**body) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [json.loads(text) for text in ARGUMENTS]
    assert final.output_text == "Let me see."


async def test_errors_name_the_field_of_a_tool(broker: Broker) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "functoin"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, *CODEX_TOOLS], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": CODEX_TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "vast"}}, "reasoning.summary"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ]
    async with answering(broker.url, Answer(ids("x")), **HERMES) as (_, _, client):
        for fields, param in refused:
            error = (await client.post(PATH, json=ASKED | fields)).json()["error"]
            assert error["param"] == param, error
