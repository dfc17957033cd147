"""What an event must not do: reach a network that is none of its receiver's, or hold up other events."""

import socket
from typing import Any

import httpx
import pytest

from api.webhooks import field
from api.webhooks.sender import MAX_PER_RECEIVER, MAX_SENDING, WAITS_S
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.openai.test_tools import CALLS, HERMES
from tests.integration.api.responses.test_tools import TOOLS
from tests.integration.api.webhooks.test_deliveries import ANSWER, allowing
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.responses.events import BODY, PATH
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import Receiver, receiving

PROMPT: dict[str, Any] = {"inputs": "Say it", "parameters": {"max_new_tokens": 2}}


async def tell(client: httpx.AsyncClient, receiver: Receiver, **fields: Any) -> None:
    answer = await client.post("/generate", json=PROMPT | {"webhook": receiver.hook(**fields)})
    assert answer.status_code == 200, answer.text


async def failed_event(client: httpx.AsyncClient) -> Any:
    """The first event that waits after a failure."""

    async def failed() -> list[Any]:
        events = (await client.get("/admin/webhooks")).raise_for_status().json()["events"]
        return [event for event in events if event["failures"]]

    [event] = await wait_until(failed)
    return event


async def test_a_redirect_is_a_failure_and_is_not_followed(broker: Broker) -> None:
    async with (
        receiving(302) as receiver,
        receiving() as inner,
        answering(broker.url, ANSWER, webhook_allowed_hosts=(receiver.host, inner.host)) as served,
    ):
        receiver.location = inner.url
        await tell(served[2], receiver)
        event = await failed_event(served[2])
        assert (event["said"], event["failures"]) == ("status 302", 1)
        wait_s = event["at"] - event["created_at"]
        assert WAITS_S[0] - 1 <= wait_s
        assert len(receiver.deliveries) == 1 and not inner.deliveries


async def test_a_private_address_is_refused_by_name_and_a_name_when_the_connection_is_made(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the host that a setting names may be private; https: alone does not open the way."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))]
    asked, known = socket.getaddrinfo, {"inner.example": found}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **words: known.get(host) or asked(host, *more, **words)
    )
    async with (
        receiving() as receiver,
        receiving() as inner,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        for host in (
            "127.0.0.1:8443",
            "[::1]",
            "10.1.2.3",
            "127.1",
            "0x7f000001",
            "localhost",
            "a.localhost",
        ):
            hook = receiver.hook(url=f"https://{host}/hooks")
            refused = await client.post("/generate", json=PROMPT | {"webhook": hook})
            assert refused.status_code == 422 and "`webhook.url` is at" in refused.json()["error"], host
        await tell(client, receiver, url=f"https://inner.example:{inner.host.rpartition(':')[2]}/hooks")
        said = (await failed_event(client))["said"]
        assert said == "the URL is at inner.example, which is no host of the public internet"
        assert not inner.deliveries


async def test_a_webhook_is_refused_while_too_many_events_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field, "MAX_WEBHOOKS", 1)
    async with (
        receiving(500) as receiver,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        await tell(client, receiver)
        await failed_event(client)
        refused = await client.post("/generate", json=PROMPT | {"webhook": receiver.hook()})
        assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
        assert (
            "events of webhooks are not delivered" in refused.json()["error"]
            and "retry-after" in refused.headers
        )
        assert (await client.post("/generate", json=PROMPT)).status_code == 200


async def test_a_receiver_that_does_not_answer_holds_up_no_other(broker: Broker) -> None:
    async with (
        receiving() as slow,
        receiving() as fast,
        answering(broker.url, ANSWER, webhook_allowed_hosts=(slow.host, fast.host)) as (_, _, client),
    ):
        slow.answers.clear()
        for _ in range(MAX_SENDING + 1):
            await tell(client, slow)
        await wait_until(lambda: len(slow.deliveries) >= MAX_PER_RECEIVER)
        await tell(client, fast)
        await wait_until(lambda: fast.deliveries)
        assert len(slow.deliveries) < MAX_SENDING
        slow.answers.set()
        await wait_until(lambda: len({*slow.ids}) > MAX_PER_RECEIVER)


async def test_a_response_is_told_as_it_says_of_itself(broker: Broker) -> None:
    """The model ends within a call, so its response is incomplete, although its last token is no cut."""
    cut = CALLS[: CALLS.rindex("{}")] + '{"place": "Z'
    async with (
        receiving(500) as receiver,
        answering(broker.url, Answer(ids(cut)), **HERMES, **allowing(receiver)) as (_, _, client),
    ):
        body = BODY | {"tools": TOOLS, "webhook": receiver.hook()}
        response = (await client.post(PATH, json=body)).raise_for_status().json()
        assert response["status"] == "incomplete"
        event = await failed_event(client)
        assert (event["type"], event["object_id"]) == ("response.incomplete", response["id"])
        (await client.delete(f"{PATH}/{response['id']}")).raise_for_status()
        (await client.post(f"/admin/webhooks/{event['id']}/retry")).raise_for_status()
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert receiver.types == ["response.incomplete"] * 2, "an event says the same each time"
