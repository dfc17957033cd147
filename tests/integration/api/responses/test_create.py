"""POST /v1/responses: the object, the events, and what is refused."""

from typing import Any

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import streamed
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.responses.events import BODY, PATH, check_response, read_events, text_of
from tests.support.tokenizer import ids

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
        whole = (await client.post(PATH, json=BODY | {"cache_salt": "s"})).raise_for_status().json()
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
        whole = (await client.post(PATH, json=body)).json()
        events = read_events(await streamed(client, PATH, body))
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete" and whole["max_output_tokens"] == 3
    assert events[-1]["type"] == "response.incomplete"


async def test_an_empty_answer_has_an_empty_message(broker: Broker) -> None:
    async with answering(broker.url, Answer([])) as (_, _, client):
        whole = (await client.post(PATH, json=BODY)).json()
    assert check_response(whole).output_text == "" and len(whole["output"]) == 1


async def test_nothing_is_left_of_a_response_that_is_not_stored(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, gateway, client):
        whole = (await client.post(PATH, json=BODY | {"store": False})).json()
        assert (await client.get(f"{PATH}/{whole['id']}")).status_code == 404
        refused = await client.post(PATH, json=BODY | {"previous_response_id": whole["id"]})
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        await streamed(client, PATH, BODY | {"store": False})
        await nothing_left(gateway, worker)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.input_image.image_url"]}, "include[0]"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
]


async def test_unsupported_fields_are_refused_by_name(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        for fields, param in REFUSED:
            response = await client.post(PATH, json=BODY | fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
        assert not worker.seen


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


async def test_whole_numbers_beyond_64_bits_are_served(broker: Broker) -> None:
    """A tool's schema comes back as it was read: such a number as a float."""
    tool = '{"type": "function", "name": "f", "parameters": {"maximum": 1%s}}' % ("0" * 25)
    content = f'{{"input": "a", "tools": [{tool}]}}'
    async with answering(broker.url, ANSWER) as (_, _, client):
        answer = await client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"][0]["parameters"] == {"maximum": 1e25}
