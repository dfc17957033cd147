"""Events of webhooks: each end is told once, signed, to whom the request named, until it is heard."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from standardwebhooks import Webhook

from api.webhooks import sender
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.batches.test_batches import chat_line, jsonl, openai_client
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.responses.events import BODY, PATH
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import SECRET, Receiver, receiving

ANSWER = Answer(ids(" one two three"))


def allowing(receiver: Receiver, **settings: Any) -> dict[str, Any]:
    return {"webhook_allowed_hosts": (receiver.host,)} | settings


async def test_a_background_response_tells_its_end_to_the_openai_package(broker: Broker) -> None:
    async with receiving() as receiver, answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client):
        body = BODY | {"background": True, "webhook": receiver.hook()}
        queued = (await client.post(PATH, json=body)).raise_for_status().json()
        await wait_until(lambda: receiver.deliveries)
        [delivery] = receiver.deliveries
        unwrapped: Any = openai.OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(
            delivery.body, delivery.headers
        )
        assert (unwrapped.type, unwrapped.data.id) == ("response.completed", queued["id"])
        assert unwrapped.id == delivery.id
        Webhook(SECRET).verify(delivery.body, delivery.headers)
        assert "secret" not in queued and SECRET not in str(queued)


async def test_a_batch_tells_its_end(broker: Broker, tmp_path: Path) -> None:
    async with (
        receiving() as receiver,
        answering(broker.url, ANSWER, files_dir=str(tmp_path), **allowing(receiver)) as (_, _, http),
    ):
        client = openai_client(http)
        good = await client.files.create(file=("in.jsonl", jsonl([chat_line(0)])), purpose="batch")
        bad = await client.files.create(file=("in.jsonl", b"{no\n"), purpose="batch")
        for file in (good, bad):
            await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                extra_body={"webhook": receiver.hook()},
            )
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert sorted(receiver.types) == ["batch.completed", "batch.failed"]


async def test_an_event_that_nobody_takes_is_dead_is_listed_and_is_sent_again(broker: Broker) -> None:
    """410 ends it at once. Then the receiver has thought better of it."""
    async with (
        receiving(410) as receiver,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        body = BODY | {"background": True, "webhook": receiver.hook()}
        queued = (await client.post(PATH, json=body)).raise_for_status().json()

        async def dead() -> Any:
            return (await client.get("/admin/webhooks?state=dead")).raise_for_status().json()["events"]

        [event] = await wait_until(dead)
        assert (event["type"], event["object_id"]) == ("response.completed", queued["id"])
        assert (event["url"], event["said"], event["failures"]) == (receiver.url, "status 410", 1)
        assert SECRET not in str(event)
        path = f"/admin/webhooks/{event['id']}/retry"
        assert (await client.post(path)).json() == {"id": event["id"], "state": "waiting"}
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert receiver.ids == [event["id"]] * 2
        await wait_until(lambda: is_empty(client))
        assert (await client.post(path)).status_code == 404


async def test_an_event_that_cannot_be_sent_is_dead_in_the_end(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RecursionError

    monkeypatch.setattr(sender, "payload_of", fail)
    monkeypatch.setattr(sender, "WAITS_S", ())
    async with (
        receiving() as receiver,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        (
            await client.post(PATH, json=BODY | {"background": True, "webhook": receiver.hook()})
        ).raise_for_status()

        async def dead() -> Any:
            return (await client.get("/admin/webhooks?state=dead")).json()["events"]

        [event] = await wait_until(dead)
        assert event["said"] == "the event cannot be sent: RecursionError"


async def is_empty(client: httpx.AsyncClient) -> bool:
    states = [(await client.get(f"/admin/webhooks?state={state}")).json() for state in ("waiting", "dead")]
    return all(content == {"events": [], "total": 0} for content in states)
