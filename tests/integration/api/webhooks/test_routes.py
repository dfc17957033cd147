"""Every route that generates takes `webhook`, and tells the end of its request."""

from typing import Any

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.webhooks.test_deliveries import ANSWER, allowing
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import Receiver, receiving

PROMPT: dict[str, Any] = {"inputs": "Say it", "parameters": {"max_new_tokens": 2}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"text_input": "Say it", "max_tokens": 2}
TENSOR = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["one", "two"]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", PROMPT),
    ("/generate_stream", PROMPT),
    ("/", PROMPT),
    ("/invocations", PROMPT),
    ("/vertex", {"instances": [PROMPT, CHAT]}),
    ("/v1/completions", {"prompt": ["Say it", "twice"], "max_tokens": 2}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/messages", CHAT),
    ("/v2/models/tgi/generate", TEXT),
    ("/v2/models/tgi/generate_stream", TEXT),
    ("/v2/models/tgi/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 2}}),
]


async def test_each_route_tells_the_end_of_its_request_once(broker: Broker) -> None:
    async with receiving() as receiver, answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client):
        expected = {}
        for path, body in ROUTES:
            answer = await client.post(path, json=body | {"webhook": receiver.hook()})
            assert answer.status_code == 200, (path, answer.text)
            expected[answer.headers["x-request-id"]] = "request.completed"
        await wait_until(lambda: len(receiver.deliveries) >= len(ROUTES))
        assert told_by(receiver) == expected
        assert len(receiver.deliveries) == len(ROUTES)


async def test_a_failure_and_a_cancel_are_told_by_their_names(broker: Broker) -> None:
    def script(request: Any) -> Answer:
        return Answer(ids(" one"), error="broken" if request.stopping.max_new_tokens == 3 else "", ends=False)

    async with receiving() as receiver, answering(broker.url, script, **allowing(receiver)) as (_, _, client):
        failed = await client.post("/v1/chat/completions", json=with_hook(CHAT | {"max_tokens": 3}, receiver))
        assert failed.status_code >= 400
        cancelled = await cancelled_chat(client, receiver)
        await wait_until(lambda: len(receiver.deliveries) >= 2)
        assert told_by(receiver) == {
            failed.headers["x-request-id"]: "request.failed",
            cancelled: "request.cancelled",
        }


async def cancelled_chat(client: httpx.AsyncClient, receiver: Receiver) -> str:
    """The id of a chat that was cancelled after its first chunk."""
    body = with_hook(CHAT | {"max_tokens": 50, "stream": True}, receiver)
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        request_id = stream.headers["x-request-id"]
        (await client.delete(f"/requests/{request_id}")).raise_for_status()
    return request_id


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/v2/models/tgi/infer"])
async def test_a_webhook_at_fault_is_named(broker: Broker, path: str) -> None:
    body = dict(ROUTES)[path]
    async with receiving() as receiver, answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client):
        wrong = await client.post(path, json=with_hook(body, receiver, events=["response.completed"]))
        assert wrong.status_code in (400, 422)
        assert "`webhook.events` must be some of request.completed" in wrong.text


async def test_an_instance_has_no_webhook_of_its_own(broker: Broker) -> None:
    async with receiving() as receiver, answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client):
        wrong = await client.post("/vertex", json={"instances": [with_hook(PROMPT, receiver)]})
        assert wrong.status_code == 422
        assert "`webhook` stands beside `instances`" in wrong.text


def with_hook(body: dict[str, Any], receiver: Receiver, **fields: Any) -> dict[str, Any]:
    return body | {"webhook": receiver.hook(**fields)}


def told_by(receiver: Receiver) -> dict[str, str]:
    """Request → the type of its event."""
    return {one.event["data"]["id"]: one.event["type"] for one in receiver.deliveries}
