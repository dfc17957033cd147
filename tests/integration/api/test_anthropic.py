"""Anthropic's routes: /v1/messages and its count_tokens, the object, the events and what reaches the model;
and /v1/models in Anthropic's shape.
"""

import json
from datetime import UTC, datetime
from typing import Any

import httpx

from api.models import STARTED_S, VERSION_HEADER
from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_chat import ARGUMENTS, CALLS, HERMES, PARAMETERS
from tests.integration.api.test_chat import TOOLS as CHAT_TOOLS
from tests.support.answers import post, streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids

PATH = "/v1/messages"
BODY: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
ASKED = BODY | {"tools": TOOLS}
THOUGHT = "<think>\nHm, 7.\n</think>\n\n"
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};"


def events_of(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is its type."""
    found = []
    for frame in content.decode().strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n"))
        found.append(json.loads(lines["data"]))
        assert lines["event"] == found[-1]["type"]
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make, as a client puts it together."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    blocks: list[dict[str, Any]] = []
    for event in middle:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]) | {"json": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind = event["delta"].pop("type").removesuffix("_delta")
                [(name, text)] = event["delta"].items()
                if kind == "input_json":
                    blocks[-1]["json"] += text
                else:
                    blocks[-1][name] += text
            case kind:
                assert (kind, event["index"]) == ("content_block_stop", len(blocks) - 1)
    for block in blocks:
        if (text := block.pop("json")) and block["type"] == "tool_use":
            block["input"] = json.loads(text)
    message: dict[str, Any] = start["message"]
    return message | {"content": blocks, "usage": delta["usage"], **delta["delta"]}


async def ask(client: httpx.AsyncClient, path: str = PATH, **fields: Any) -> dict[str, Any]:
    content: dict[str, Any] = await post(client, path, ASKED | fields)
    return content


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two requests."""
    content = [
        block | {key: "" for key in ("id", "signature") if key in block} for block in message["content"]
    ]
    return message | {"id": "", "content": content}


async def test_a_message_is_the_same_streamed_and_whole(broker: Broker) -> None:
    answer = Answer(ids(" one two é🙂 three"), num_cached=16)
    async with answering(broker.url, answer) as (_, _, client):
        response = await client.post(PATH, json=BODY)
        whole = response.json()
        events = events_of(await streamed(client, PATH, BODY))
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert whole["id"] == f"msg_{response.headers['request-id']}"
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "end_turn")
    assert whole["content"] == [{"type": "text", "text": " one two é🙂 three"}]
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 16 and usage["output_tokens"] == len(answer.ids) + 1
    assert anonymous(accumulated(events)) == anonymous(whole)
    assert events[0]["message"]["stop_reason"] is None and events[0]["message"]["content"] == []


async def test_reasoning_text_and_calls_are_blocks_of_their_own(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(THOUGHT + CALLS)), **HERMES) as (_, _, client):
        whole = await ask(client)
        made = accumulated(events_of(await streamed(client, PATH, ASKED)))
        one = await ask(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        none = await ask(client, tool_choice={"type": "none"})
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, *calls = whole["content"]
    assert thought["thinking"] == "Hm, 7." and thought["signature"] and text["text"] == "Let me see."
    assert [(call["name"], call["input"]) for call in calls] == [
        ("get_weather", json.loads(ARGUMENTS[0])),
        ("get_time", {}),
    ]
    assert whole["stop_reason"] == "tool_use" and len({call["id"] for call in calls}) == 2
    assert anonymous(made) == anonymous(whole)
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]


async def test_why_a_message_ends(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" one two three")), **HERMES) as (_, _, client):
        cut = await ask(client, max_tokens=2)
        stopped = await ask(client, stop_sequences=["two", "nowhere"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"] == [{"type": "text", "text": " one "}]


async def test_a_call_that_is_cut_is_no_reason_to_run_it(broker: Broker) -> None:
    """It has the arguments that are complete, as Anthropic's client reads them from a stream."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome", "unit": "Cel'
    async with answering(broker.url, Answer(ids(text)), **HERMES) as (_, _, client):
        cut = await ask(client, max_tokens=len(ids(text)) - 1)
        ended = await ask(client)
    for message in (cut, ended):
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][0]["input"] == {"place": "Rome"}


async def test_calls_and_results_are_in_the_next_prompt(broker: Broker) -> None:
    """The prompt is the one that the same chat has on OpenAI's route."""
    noon = [{"type": "text", "text": "noon", "cache_control": {"type": "ephemeral"}}]
    async with answering(broker.url, Answer(ids(CALLS)), **HERMES) as (worker, _, client):
        first = await ask(client)
        calls = [block for block in first["content"] if block["type"] == "tool_use"]
        call_ids = [call["id"] for call in calls]
        results = [
            {"type": "tool_result", "tool_use_id": call_ids[0], "content": "31 degrees"},
            {"type": "tool_result", "tool_use_id": call_ids[1], "content": noon, "is_error": False},
            {"type": "text", "text": "So?"},
        ]
        turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        await ask(client, messages=[*BODY["messages"], *turns])
        functions = [{"name": one["name"], "arguments": one["input"]} for one in calls]
        asked = [{"id": call["id"], "function": one} for call, one in zip(calls, functions, strict=True)]
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": "Let me see.", "tool_calls": asked},
            {"role": "tool", "tool_call_id": call_ids[0], "content": "31 degrees"},
            {"role": "tool", "tool_call_id": call_ids[1], "content": "noon"},
            {"role": "user", "content": "So?"},
        ]
        await client.post("/v1/chat/completions", json={"messages": messages, "tools": CHAT_TOOLS})
    own, chat = worker.prompts[1:]
    assert own == chat and "31 degrees" in own and "noon" in own


async def test_turns_of_one_role_are_one_and_blocks_are_lines(broker: Broker) -> None:
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    turns = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "The"},
    ]
    async with answering(broker.url, Answer(ids(" answer"))) as (worker, _, client):
        message = await ask(client, tools=None, system=blocks, messages=turns)
        await ask(client, tools=None, system="Be brief.\nBe kind.", messages=turns)
    first, second = worker.prompts
    assert first == second and "Be brief.\nBe kind." in first and "One\nTwo" in first
    assert first.endswith("The") and message["content"] == [{"type": "text", "text": " answer"}]


async def test_claude_codes_changing_line_is_left_out_of_the_prompt(broker: Broker) -> None:
    """As a block, as the first line of a text, and only there; also where a proxy makes a chat of it."""
    block = {"type": "text", "text": "You are an agent."}
    systems: list[Any] = [
        [{"type": "text", "text": BILLING.format("aaaaa")}, block],
        [{"type": "text", "text": BILLING.format("bbbbb")}, block],
        BILLING.format("ccccc") + "\nYou are an agent.",
        "You are an agent.",
    ]
    quoted = "About it:\n" + BILLING.format("ddddd")
    async with answering(broker.url, Answer(ids(" one"))) as (worker, _, client):
        for system in (*systems, quoted):
            await ask(client, system=system)
        for system in (*systems, quoted):
            messages = [{"role": "system", "content": system}, *BODY["messages"]]
            await client.post("/v1/chat/completions", json={"messages": messages})
    for *same, other in (worker.prompts[:5], worker.prompts[5:]):
        assert len(set(same)) == 1 and "x-anthropic" not in same[0] and "cch=ddddd" in other


async def test_a_tool_that_a_search_found_is_known_by_its_name(broker: Broker) -> None:
    search = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
    found = {"type": "tool_reference", "tool_name": "mcp__sky__get_weather"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found]}
    turns = [{"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]
    async with answering(broker.url, Answer(ids(" one"))) as (worker, _, client):
        await ask(client, messages=[*BODY["messages"], *turns])
    assert "<|im_start|>user\nmcp__sky__get_weather<|im_end|>" in worker.prompts[0]


async def test_tokens_are_counted_as_the_prompt_has_them(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" one")), **HERMES) as (worker, _, client):
        message = await ask(client, system="Be brief.")
        body = {key: value for key, value in ASKED.items() if key != "max_tokens"}
        counted = await post(client, f"{PATH}/count_tokens", body | {"system": "Be brief."})
        assert len(worker.seen) == 1
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


async def test_tools_of_anthropics_servers_are_left_out_unless_they_are_forced(broker: Broker) -> None:
    built_in = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    async with answering(broker.url, Answer(ids(" one")), **HERMES) as (worker, _, client):
        await ask(client, tools=[*TOOLS, built_in])
        await ask(client)
        with_it, without = worker.prompts
        assert with_it == without
        for tools, choice in (
            ([*TOOLS, built_in], {"type": "tool", "name": "web_search"}),
            ([built_in], {"type": "any"}),
        ):
            refused = await client.post(PATH, json=ASKED | {"tools": tools, "tool_choice": choice})
            assert refused.status_code == 400 and "`tool_choice` forces" in refused.text


async def test_hints_are_accepted_and_max_tokens_is_what_fits(broker: Broker) -> None:
    hints = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "standard_only",
        "top_k": 5,
        "top_p": 0.9,
        "temperature": 0.0,
    }
    async with answering(broker.url, Answer(ids(" one")), **HERMES) as (worker, _, client):
        await ask(client, f"{PATH}?beta=true", max_tokens=1_000_000, **hints)
        [request] = worker.seen
    num_prompt = len(unpack_ids(request.prompt_ids))
    assert 0 < request.stopping.max_new_tokens < 1_000_000 - num_prompt


async def test_a_key_is_taken_from_anthropic_s_header(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" one")), api_key="secret") as (_, _, client):
        for key, status in (("secret", 200), ("other", 401)):
            assert (await client.post(PATH, json=BODY, headers={"x-api-key": key})).status_code == status


MODELS_ASKED = {VERSION_HEADER: "2023-06-01"}
CREATED = datetime.fromtimestamp(STARTED_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_anthropics_clients_get_its_list(broker: Broker) -> None:
    async with answering(broker.url, Answer([]), served_model_name=("one", "two")) as (_, _, client):
        listed = await client.get("/v1/models", headers=MODELS_ASKED)
        first = await client.get("/v1/models?limit=1", headers=MODELS_ASKED)
        found = await client.get("/v1/models/one", headers=MODELS_ASKED)
        missing: httpx.Response = await client.get("/v1/models/three", headers=MODELS_ASKED)
        wrong = await client.get("/v1/models?after_id=three", headers=MODELS_ASKED)
        plain = await client.get("/v1/models?limit=1&after_id=three")
    one, two = (
        {"type": "model", "id": name, "display_name": name, "created_at": CREATED} for name in ("one", "two")
    )
    assert listed.json() == {"data": [one, two], "first_id": "one", "last_id": "two", "has_more": False}
    assert first.json() == {"data": [one], "first_id": "one", "last_id": "one", "has_more": True}
    assert found.json() == one and missing.status_code == 404
    assert wrong.status_code == 400 and "`after_id` must be an id of the list" in wrong.text
    assert [model["id"] for model in plain.json()["data"]] == ["one", "two"]
