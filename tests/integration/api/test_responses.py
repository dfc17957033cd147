"""POST /v1/responses: the object, its events, calls and reasoning; and stored responses, which are retrieved,
continued, followed, cancelled and deleted at any gateway, by their owner.
"""

import asyncio
import logging
from typing import Any, get_args

import httpx
import pytest
from openai.types.responses import ResponseIncludable

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_chat import ARGUMENTS, CALLS, HERMES, PARAMETERS
from tests.integration.api.test_resume import LONG, two_gateways
from tests.support.answers import BODY, PATH, check_response, post, read_events, streamed, text_of
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_for, wait_until

ANSWER = Answer(ids(" one two é🙂 three"), num_cached=16)
KINDS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def test_a_response_is_the_same_streamed_and_whole(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        whole = await post(client, PATH, BODY | {"cache_salt": "s"})
        assert [request.cache_salt for request in worker.seen] == ["s"]
        events = read_events(await streamed(client, PATH, BODY))
    parsed = check_response(whole)
    assert parsed.output_text == " one two é🙂 three" == text_of(events)
    assert parsed.status == "completed" and parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.input_tokens + parsed.usage.output_tokens
    assert parsed.usage.input_tokens_details.cached_tokens == ANSWER.num_cached > 0
    assert list(dict.fromkeys(one["type"] for one in events)) == KINDS
    assert [one["sequence_number"] for one in events] == [*range(len(events))]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert {one["item_id"] for one in events if "item_id" in one} == {events[-2]["item"]["id"]}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    content = [item["content"] for item in response["output"]]
    return response | {"id": None, "created_at": 0, "output": content}


async def test_an_answer_that_is_cut_is_incomplete(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(" one two three four"))) as (_, _, client):
        body = BODY | {"max_output_tokens": 3}
        whole = await post(client, PATH, body)
        events = read_events(await streamed(client, PATH, body))
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete" and whole["max_output_tokens"] == 3
    assert events[-1]["type"] == "response.incomplete"


async def test_an_empty_answer_has_an_empty_message(broker: Broker) -> None:
    async with answering(broker.url, Answer([])) as (_, _, client):
        whole = await post(client, PATH, BODY)
    assert check_response(whole).output_text == "" and len(whole["output"]) == 1


async def test_nothing_is_left_of_a_response_that_is_not_stored(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, gateway, client):
        whole = await post(client, PATH, BODY | {"store": False})
        assert (await client.get(f"{PATH}/{whole['id']}")).status_code == 404
        refused = await client.post(PATH, json=BODY | {"previous_response_id": whole["id"]})
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        await streamed(client, PATH, BODY | {"store": False})
        await nothing_left(gateway, worker)


@pytest.mark.parametrize("path", ["resp_1", f"resp_{'0' * 32}", "x"])
async def test_unknown_responses_are_not_found(broker: Broker, path: str) -> None:
    async with answering(broker.url, ANSWER) as (_, _, client):
        calls = [
            client.get(f"{PATH}/{path}"),
            client.delete(f"{PATH}/{path}"),
            client.post(f"{PATH}/{path}/cancel"),
            client.get(f"{PATH}/{path}/input_items"),
        ]
        found: list[httpx.Response] = [await call for call in calls]
        assert [one.status_code for one in found] == [404] * 4
        assert {one.json()["error"]["type"] for one in found} == {"invalid_request_error"}


STORED_ANSWER = Answer(ids(" one two é🙂 three"))
BACKGROUND = BODY | {"background": True}


async def get(client: httpx.AsyncClient, response_id: str, **options: Any) -> dict[str, Any]:
    response = await client.get(f"{PATH}/{response_id}", **options)
    content: dict[str, Any] = response.json()
    assert response.status_code == 200, content
    return content


async def ended(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    """The response, once it has ended."""

    async def has_ended() -> bool:
        return (await get(client, response_id))["status"] not in ("queued", "in_progress")

    await wait_until(has_ended)
    return await get(client, response_id)


async def follow(client: httpx.AsyncClient, response_id: str, after: int | None = None) -> bytes:
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    response = await client.get(f"{PATH}/{response_id}", params=params)
    assert response.status_code == 200, response.content
    return response.content


async def test_a_response_is_retrieved_as_it_was_at_another_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url, STORED_ANSWER) as (_, _, client, other):
        whole = await post(client, PATH, BODY)
        assert await get(other, whole["id"]) == whole
        sent = await streamed(client, PATH, BODY)
        events = read_events(sent)
        last = events[-1]["response"]
        assert await get(other, last["id"]) == last
        assert await follow(other, last["id"]) == sent
        for after in (0, 4, len(events) - 2):
            assert read_events(await follow(other, last["id"], after)) == events[after + 1 :]
        assert await follow(other, last["id"], len(events) - 1) == b""
        wrong = await other.get(f"{PATH}/{last['id']}", params={"stream": "true", "starting_after": "999"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")


async def test_a_conversation_goes_on_after_a_response(broker: Broker) -> None:
    async with answering(broker.url, STORED_ANSWER) as (worker, _, client):

        async def ask(**fields: Any) -> dict[str, Any]:
            content: dict[str, Any] = await post(client, PATH, fields)
            return content

        first = await ask(input="Hi", instructions="Be kind.")
        second = await ask(input="And?", previous_response_id=first["id"])
        item_id = second["output"][0]["id"]
        third = await ask(input=[{"type": "item_reference", "id": item_id}, {"role": "user", "content": "X"}])
        await client.delete(f"{PATH}/{first['id']}")
        fourth = await ask(input="Now?", previous_response_id=second["id"], instructions="Be short.")
        prompts = worker.prompts
        items = (await client.get(f"{PATH}/{fourth['id']}/input_items", params={"order": "asc"})).json()
        page = (await client.get(f"{PATH}/{fourth['id']}/input_items", params={"limit": 2})).json()
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    text = " one two é🙂 three"
    assert "Be kind." in prompts[0] and "Be kind." not in prompts[1]
    assert turn.format("Hi", text) in prompts[1] and "user\nAnd?<|im_end|>" in prompts[1]
    assert f"assistant\n{text}<|im_end|>\n<|im_start|>user\nX<|im_end|>" in prompts[2]
    assert turn.format("Hi", text) + turn.format("And?", text) in prompts[3] and "Be short." in prompts[3]
    assert (third["previous_response_id"], fourth["previous_response_id"]) == (None, second["id"])
    roles = [item["role"] for item in items["data"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"] and not items["has_more"]
    assert [item["id"] for item in page["data"]] == [item["id"] for item in items["data"]][:2:-1]
    assert page["has_more"] and page["last_id"] == page["data"][-1]["id"]


async def test_a_background_response_needs_no_client(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG) as (worker, _, client, other):
        queued = await post(client, PATH, BACKGROUND)
        assert queued["status"] == "queued" and queued["output"] == []
        check_response(queued)
        done = await ended(other, queued["id"])
        assert done["status"] == "completed"
        assert check_response(done).output_text == TOKENIZER.decode(LONG.ids)
        await wait_until(lambda: not worker.live)


async def test_another_gateway_follows_a_background_stream_after_any_event(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.02) as (_, _, client, other):
        async with client.stream("POST", PATH, json=BACKGROUND | {"stream": True}) as response:
            seen = b""
            async for chunk in response.aiter_raw():
                seen += chunk
                if seen.count(b"\n\n") > 8:
                    break
        first = read_events(seen)
        assert [one["type"] for one in first[:3]] == [
            f"response.{kind}" for kind in ("created", "queued", "in_progress")
        ]
        rest = read_events(await follow(other, first[0]["response"]["id"], first[-1]["sequence_number"]))
        assert text_of(first + rest) == TOKENIZER.decode(LONG.ids)
        assert [one["sequence_number"] for one in first + rest] == [*range(len(first + rest))]
        assert rest[-1]["type"] == "response.completed"
        assert rest[-1]["response"] == await get(client, first[0]["response"]["id"])


async def test_only_a_background_response_is_cancelled(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.1) as (worker, _, client, other):
        queued = await post(client, PATH, BACKGROUND | {"stream": False})
        await wait_until(lambda: worker.live)
        cancelled = (await other.post(f"{PATH}/{queued['id']}/cancel")).raise_for_status().json()
        assert cancelled["status"] == "cancelled" and check_response(cancelled).usage is None
        assert (await other.post(f"{PATH}/{queued['id']}/cancel")).json() == cancelled
        assert await get(client, queued["id"]) == cancelled
        refused = await client.post(PATH, json=BODY | {"previous_response_id": queued["id"]})
        assert refused.json()["error"]["param"] == "previous_response_id"
    async with answering(broker.url, STORED_ANSWER) as (_, _, client):
        whole = await post(client, PATH, BODY)
        assert (await client.post(f"{PATH}/{whole['id']}/cancel")).status_code == 400


async def test_a_response_can_be_deleted_before_it_has_ended(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.1) as (worker, one, client, other):
        done = await post(client, PATH, BODY | {"max_output_tokens": 1})
        queued = await post(client, PATH, BACKGROUND)
        for response in (done, queued):
            deleted = await other.delete(f"{PATH}/{response['id']}")
            assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
            assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404
        await wait_until(lambda: not worker.live and not one.pool.relay.streams)
        left = [worker.keys.request(response["id"][5:]) for response in (done, queued)]

        await wait_for(lambda: worker.redis.exists(*left), 0)


async def test_a_client_that_leaves_cancels_its_response_which_stays(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with answering(broker.url, LONG) as (worker, _, client):
        worker.step_s = 0.1
        body = BODY | {"stream": True, "instructions": "Be terse today."}
        async with client.stream("POST", PATH, json=body) as response:
            async for _ in response.aiter_raw():
                break
            request_id = response.headers["x-request-id"]
        await wait_until(lambda: worker.seen and not worker.live)
        await asyncio.sleep(0)
        left = await ended(client, f"resp_{request_id}")
        assert left["status"] == "cancelled"
        events = read_events(await follow(client, left["id"]))
        assert events[-1]["response"] == left and left["instructions"] == "Be terse today."
        for after in (0, len(events) - 2, len(events) - 1):
            assert read_events(await follow(client, left["id"], after)) == events[after + 1 :]
    assert "terse" not in caplog.text


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
    {"type": "function", "name": "get_time"},
]
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": ""},
    },
]
ASKED = BODY | {"tools": TOOLS}
THOUGHT = "<think>\nHm, 7.\n</think>\n\n"


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    content: dict[str, Any] = await post(client, PATH, ASKED | fields)
    check_response(content)
    return content


async def test_reasoning_text_and_calls_are_items_of_their_own(broker: Broker) -> None:
    async with answering(broker.url, Answer(ids(THOUGHT + CALLS)), **HERMES) as (_, _, client):
        whole = await ask(client)
        events = read_events(await streamed(client, PATH, ASKED))
        stored = (await client.get(f"{PATH}/{events[0]['response']['id']}")).json()
        one = await ask(client, parallel_tool_calls=False)
        none = await ask(client, tool_choice="none", tools=TOOLS[:1])
        hidden = await ask(client, include_reasoning=False)
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
    assert [item["type"] for item in hidden["output"]] == kinds[1:]


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
    prompts = worker.prompts
    assert prompts[1] == prompts[2] == prompts[3]
    assert prompts[1].count("fine") == 2 and "get_weather" in prompts[1] and "Let me see." in prompts[1]
    assert [item["type"] for item in items] == [
        *["function_call_output"] * 2,
        *["function_call"] * 2,
        "message",
        "reasoning",
        "message",
    ]


def in_namespace(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": "mcp__sky", "description": "", "tools": [*tools]}


async def test_functions_of_a_namespace_are_called_by_their_own_name_and_its(broker: Broker) -> None:
    """So Codex knows the tool of which MCP server to run. The model calls them by one name, now and in the
    next prompt.
    """
    weather, own = {"namespace": "mcp__sky", "name": "get_weather"}, {"name": "mcp__sky__get_weather"}
    flat = CALLS.replace('"get_weather"', f'"{own["name"]}"')
    spaces = [in_namespace(TOOLS[0], CODEX_TOOLS[-1]), TOOLS[1]]
    async with answering(broker.url, Answer(ids(flat)), **HERMES) as (worker, _, client):
        whole = await ask(client, tools=spaces)
        events = read_events(await streamed(client, PATH, ASKED | {"tools": spaces}))
        await ask(client, tools=[TOOLS[0] | own, TOOLS[1]])
        question = {"role": "user", "content": BODY["input"]}
        history = [[question, *whole["output"]], [question, *whole["output"]]]
        history[1][2] = {key: value for key, value in history[1][2].items() if key != "namespace"} | own
        for items in history:
            await ask(client, tools=spaces, input=items)
    for response in (whole, events[-1]["response"]):
        _, call, other = response["output"]
        assert call.items() >= weather.items() and "namespace" not in other
        assert other["name"] == "get_time" and response["tools"] == spaces
    items = [event["item"] for event in events if event.get("item", {}).get("call_id") == call["call_id"]]
    assert [(one["namespace"], one["name"]) for one in items] == [(*weather.values(),)] * 2
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == ["get_weather", "get_time"]
    first, _, as_one_name, turn, turn_as_one_name = worker.prompts
    assert first == as_one_name and turn == turn_as_one_name and turn.count(own["name"]) == 2


async def test_tools_that_no_model_here_can_call_are_left_out(broker: Broker) -> None:
    """The prompt is the same without them, and the answer shows them, as Codex sent them."""
    fields = {
        "tools": [*CODEX_TOOLS, *TOOLS],
        "include": [*get_args(ResponseIncludable)],
        "store": False,
        "tool_choice": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "reasoning_effort": "low",
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
