"""Stored responses: retrieved, continued, followed, cancelled and deleted, at any gateway, by their owner."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.resume.test_resume import two_gateways
from tests.support.answers.openai_frames import streamed
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.responses.events import BODY, PATH, check_response, read_events, text_of
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

ANSWER = Answer(ids(" one two é🙂 three"))
LONG = Answer(ids(" one two é🙂 three four five" * 8))
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
    async with two_gateways(broker.url, ANSWER) as (_, _, client, other):
        whole = (await client.post(PATH, json=BODY)).json()
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
    async with answering(broker.url, ANSWER) as (worker, _, client):

        async def ask(**fields: Any) -> dict[str, Any]:
            content: dict[str, Any] = (await client.post(PATH, json=fields)).raise_for_status().json()
            return content

        first = await ask(input="Hi", instructions="Be kind.")
        second = await ask(input="And?", previous_response_id=first["id"])
        item_id = second["output"][0]["id"]
        third = await ask(input=[{"type": "item_reference", "id": item_id}, {"role": "user", "content": "X"}])
        await client.delete(f"{PATH}/{first['id']}")
        fourth = await ask(input="Now?", previous_response_id=second["id"], instructions="Be short.")
        prompts = [
            TOKENIZER.decode(unpack_ids(one.prompt_ids), skip_special_tokens=False) for one in worker.seen
        ]
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
        queued = (await client.post(PATH, json=BACKGROUND)).raise_for_status().json()
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
        queued = (await client.post(PATH, json=BACKGROUND | {"stream": False})).json()
        await wait_until(lambda: worker.live)
        cancelled = (await other.post(f"{PATH}/{queued['id']}/cancel")).raise_for_status().json()
        assert cancelled["status"] == "cancelled" and check_response(cancelled).usage is None
        assert (await other.post(f"{PATH}/{queued['id']}/cancel")).json() == cancelled
        assert await get(client, queued["id"]) == cancelled
        refused = await client.post(PATH, json=BODY | {"previous_response_id": queued["id"]})
        assert refused.json()["error"]["param"] == "previous_response_id"
    async with answering(broker.url, ANSWER) as (_, _, client):
        whole = (await client.post(PATH, json=BODY)).json()
        assert (await client.post(f"{PATH}/{whole['id']}/cancel")).status_code == 400


async def test_a_response_can_be_deleted_before_it_has_ended(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG, step_s=0.1) as (worker, one, client, other):
        done = (await client.post(PATH, json=BODY | {"max_output_tokens": 1})).json()
        queued = (await client.post(PATH, json=BACKGROUND)).json()
        for response in (done, queued):
            deleted = await other.delete(f"{PATH}/{response['id']}")
            assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
            assert (await client.get(f"{PATH}/{response['id']}")).status_code == 404
        await wait_until(lambda: not worker.live and not one.pool.relay.streams)
        left = [worker.keys.request(response["id"][5:]) for response in (done, queued)]

        async def nothing_is_left() -> bool:
            return not await worker.redis.exists(*left)

        await wait_until(nothing_is_left)


async def test_a_response_belongs_to_a_key(broker: Broker) -> None:
    own = {"authorization": "Bearer one"}
    async with answering(broker.url, ANSWER) as (_, _, client):
        whole = (await client.post(PATH, json=BODY, headers=own)).json()
        path = f"{PATH}/{whole['id']}"
        for headers in ({"authorization": "Bearer two"}, {}):
            calls = (
                client.get(path, headers=headers),
                client.delete(path, headers=headers),
                client.post(f"{path}/cancel", headers=headers),
                client.get(f"{path}/input_items", headers=headers),
            )
            assert [(await call).status_code for call in calls] == [404] * 4
            body = BODY | {"previous_response_id": whole["id"]}
            assert (await client.post(PATH, json=body, headers=headers)).status_code == 400
            reference = {"type": "item_reference", "id": whole["output"][0]["id"]}
            assert (await client.post(PATH, json={"input": [reference]}, headers=headers)).status_code == 400
        assert await get(client, whole["id"], headers=own) == whole


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


async def test_a_stored_response_expires(broker: Broker) -> None:
    async with answering(broker.url, ANSWER, answer_ttl_s=4000.0) as (worker, _, client):
        whole = (await client.post(PATH, json=BODY)).json()
        request_id = whole["id"].removeprefix("resp_")
        for key in (worker.keys.request(request_id), worker.keys.tokens(request_id)):
            assert 3900_000 < await worker.redis.pttl(key) <= 4000_000


async def test_of_too_many_stored_responses_the_oldest_are_deleted(broker: Broker) -> None:
    async with answering(broker.url, ANSWER, max_stored_responses=2) as (worker, _, client):
        made = [(await client.post(PATH, json=BODY)).json()["id"] for _ in range(3)]
        await client.post(PATH, json=BODY | {"store": False})
        found = [(await client.get(f"{PATH}/{one}")).status_code for one in made]
        assert found == [404, 200, 200]
        await client.delete(f"{PATH}/{made[1]}")
        assert await worker.redis.zcard(worker.keys.responses) == 1
        assert not await worker.redis.exists(worker.keys.tokens(made[0].removeprefix("resp_")))
