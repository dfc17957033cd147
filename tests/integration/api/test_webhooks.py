"""Webhooks: each end is told once, signed, to whom the request, job or API key named, until it is heard; and
no event reaches a private network or holds up another.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis
from standardwebhooks import Webhook

from api import webhooks
from api.webhooks import MAX_PER_RECEIVER, MAX_SENDING, WAITS_S
from deploy.cli.admin import main
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_batches import chat_line, jsonl, openai_client
from tests.integration.api.test_chat import CALLS, HERMES
from tests.integration.api.test_responses import TOOLS
from tests.support.answers import BODY, PATH, post
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import answering, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import CHAT, Service, answer, running_gateway
from tests.support.keys.issued import add_key, bearer
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import SECRET, Receiver, receiving

ANSWER = Answer(ids(" one two three"))


def allowing(receiver: Receiver, **settings: Any) -> dict[str, Any]:
    return {"webhook_allowed_hosts": (receiver.host,)} | settings


async def test_a_background_response_tells_its_end_to_the_openai_package(broker: Broker) -> None:
    async with receiving() as receiver, answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client):
        body = BODY | {"background": True, "webhook": receiver.hook()}
        queued = await post(client, PATH, body)
        await wait_until(lambda: receiver.deliveries)
        [delivery] = receiver.deliveries
        unwrapped: Any = openai.OpenAI(api_key="x", webhook_secret=SECRET).webhooks.unwrap(
            delivery.body, delivery.headers
        )
        assert (unwrapped.type, unwrapped.data.id) == ("response.completed", queued["id"])
        assert unwrapped.id == delivery.id
        Webhook(SECRET).verify(delivery.body, delivery.headers)
        assert "secret" not in queued and SECRET not in str(queued)


async def test_each_model_of_a_fleet_tells_its_ends(broker: Broker) -> None:
    """MODELS: the gateways of the first pool serve them all."""
    models = ("x/b=smollm2",)
    async with (
        receiving() as receiver,
        working(broker.url, TOKENIZER, lambda _: ANSWER, pool="x/b"),
        serving(broker.url, models=models, **allowing(receiver)) as (_, client),
    ):
        body = BODY | {"model": "x/b", "background": True, "webhook": receiver.hook()}
        queued = await post(client, PATH, body)
        await wait_until(lambda: receiver.deliveries)
        assert told_by(receiver) == {queued["id"]: "response.completed"}


PROMPT: dict[str, Any] = {"inputs": "Say it", "parameters": {"max_new_tokens": 2}}
SHORT_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 2}


async def test_a_failure_and_a_cancel_are_told_by_their_names(broker: Broker) -> None:
    def script(request: Any) -> Answer:
        error = "forward" if request.stopping.max_new_tokens == 3 else ""
        return Answer(ids(" one"), error=error, ends=False)

    async with receiving() as receiver, answering(broker.url, script, **allowing(receiver)) as (_, _, client):
        failed = await client.post(
            "/v1/chat/completions", json=with_hook(SHORT_CHAT | {"max_tokens": 3}, receiver)
        )
        assert failed.status_code >= 400
        cancelled = await cancelled_chat(client, receiver)
        await wait_until(lambda: len(receiver.deliveries) >= 2)
        assert told_by(receiver) == {
            failed.headers["x-request-id"]: "request.failed",
            cancelled: "request.cancelled",
        }


async def cancelled_chat(client: httpx.AsyncClient, receiver: Receiver) -> str:
    """The id of a chat that was cancelled after its first chunk."""
    body = with_hook(SHORT_CHAT | {"max_tokens": 50, "stream": True}, receiver)
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        request_id = stream.headers["x-request-id"]
        (await client.delete(f"/requests/{request_id}")).raise_for_status()
    return request_id


def with_hook(body: dict[str, Any], receiver: Receiver, **fields: Any) -> dict[str, Any]:
    return body | {"webhook": receiver.hook(**fields)}


def told_by(receiver: Receiver) -> dict[str, str]:
    """Request → the type of its event."""
    return {one.event["data"]["id"]: one.event["type"] for one in receiver.deliveries}


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
        hook = receiver.hook(url="https://127.0.0.1:8443/hooks")
        refused = await client.post("/generate", json=PROMPT | {"webhook": hook})
        assert refused.status_code == 422 and "`webhook.url` is at" in refused.json()["error"]
        await tell(client, receiver, url=f"https://inner.example:{inner.host.rpartition(':')[2]}/hooks")
        said = (await failed_event(client))["said"]
        assert said == "the URL is at inner.example, which is no host of the public internet"
        assert not inner.deliveries


async def test_a_webhook_is_refused_while_too_many_events_wait(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MAX_WEBHOOKS", 1)
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
        response = await post(client, PATH, body)
        assert response["status"] == "incomplete"
        event = await failed_event(client)
        assert (event["type"], event["object_id"]) == ("response.incomplete", response["id"])
        (await client.delete(f"{PATH}/{response['id']}")).raise_for_status()
        (await client.post(f"/admin/webhooks/{event['id']}/retry")).raise_for_status()
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert receiver.types == ["response.incomplete"] * 2, "an event says the same each time"


@pytest.fixture
async def receiver(broker: Broker) -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def worker(broker: Broker, receiver: Receiver) -> AsyncIterator[FakeWorker]:
    async with (
        working(broker.url, TOKENIZER, answer) as worker,
        running_gateway(broker.url, **allowing(receiver)),
    ):
        yield worker


async def test_each_end_of_a_job_is_told_once(redis: Redis, worker: FakeWorker, receiver: Receiver) -> None:
    await redis.xadd(KEYS.submit, {"cancel": "cancelled"})
    submit = partial(Service(redis).submit, webhook=receiver.hook())
    await submit(id="prompt", inputs="Count.")
    await submit(id="chat", **CHAT, parameters={"n": 2})
    await submit(id="faulty", inputs="Count.", prioritty=1)
    await submit(id="cancelled", inputs="Count.")
    await wait_until(lambda: len(receiver.deliveries) >= 4)
    assert told_by(receiver) == {
        "prompt": "job.completed",
        "chat": "job.completed",
        "faulty": "job.failed",
        "cancelled": "job.cancelled",
    }
    await submit(id="prompt", inputs="Count.")
    await wait_until(lambda: is_answered(redis))
    assert len(receiver.deliveries) == 4
    kept = await redis.hgetall(KEYS.job("prompt"))  # type: ignore[misc]
    assert SECRET not in str(kept)


async def is_answered(redis: Redis) -> bool:
    return not await redis.xlen(KEYS.submit) and not await redis.zcard(KEYS.webhooks)


async def test_a_webhook_at_fault_is_the_fault_of_its_job(
    redis: Redis, worker: FakeWorker, receiver: Receiver
) -> None:
    service = Service(redis)
    for hook, words in (
        (receiver.hook(url="http://example.org"), "`webhook.url` must begin with https:"),
        (receiver.hook(secrett="a"), "`webhook.secrett`"),
    ):
        refused = await service.answer(inputs="Count.", webhook=hook)
        assert words in refused["error"]
    assert not receiver.deliveries and not worker.seen


async def test_all_that_a_key_asks_for_is_told(broker: Broker, redis: Redis, tmp_path: Path) -> None:
    async with receiving() as receiver, receiving() as named:
        told = await add_key(redis, tenant="acme", webhook=receiver.url, webhook_secret=SECRET)
        quiet, admin = await add_key(redis), await add_key(redis, admin=True)
        hosts = (receiver.host, named.host)
        async with answering(broker.url, ANSWER, files_dir=str(tmp_path), webhook_allowed_hosts=hosts) as (
            _,
            _,
            client,
        ):
            chat = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(told))
            response = await client.post(PATH, json=BODY, headers=bearer(told))
            await Service(redis).submit(told.text, id="mine", inputs="a")
            client.headers.update(bearer(told))
            files = openai_client(client).with_options(api_key=told.text)
            asked: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            good = await files.files.create(file=("in.jsonl", jsonl([chat_line(0)])), purpose="batch")
            batch = await files.batches.create(**asked, input_file_id=good.id)
            bad = await files.files.create(file=("in.jsonl", b"{no\n"), purpose="batch")
            asked["extra_body"] = {"webhook": named.hook()}
            faulty = await files.batches.create(**asked, input_file_id=bad.id)
            own = await client.post("/generate", json=PROMPT | {"webhook": named.hook()})
            await client.post("/generate", json=PROMPT, headers=bearer(quiet))
            await wait_until(lambda: len(receiver.deliveries) >= 4 and len(named.deliveries) >= 2)
            listed = (await client.get("/admin/keys", headers=bearer(admin))).json()["keys"]
        assert told_by(receiver) == {
            chat.headers["x-request-id"]: "request.completed",
            response.json()["id"]: "response.completed",
            "mine": "job.completed",
            batch.id: "batch.completed",
        }
        assert told_by(named) == {own.headers["x-request-id"]: "request.completed", faulty.id: "batch.failed"}
        assert len(receiver.deliveries) == 4, "a line of a batch is no event"
        Webhook(SECRET).verify(receiver.deliveries[0].body, receiver.deliveries[0].headers)
        assert sorted(key["webhook"] for key in listed) == ["", "", receiver.url] and SECRET not in str(
            listed
        )


async def test_dead_events_are_shown_and_sent_again(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    async with (
        receiving(410) as receiver,
        answering(broker.url, ANSWER, **allowing(receiver)) as (_, _, client),
    ):
        url = str(client.base_url)

        async def run(*words: str) -> str:
            assert await asyncio.to_thread(main, ["webhooks", *words, "--url", url]) == 0
            return capsys.readouterr().out

        assert await run("list") == "no events are waiting\n"
        body = BODY | {"background": True, "webhook": receiver.hook()}
        (await client.post(PATH, json=body)).raise_for_status()

        async def dead() -> bool:
            return "status 410" in await run("dead")

        await wait_until(dead)
        line = (await run("dead")).splitlines()[1]
        event_id = line.split()[0]
        assert "response.completed" in line and receiver.url in line and SECRET not in line
        assert await run("retry", event_id) == f"{event_id} is sent now\n"
        await wait_until(lambda: len(receiver.deliveries) == 2)
        assert receiver.ids == [event_id] * 2
        assert await asyncio.to_thread(main, ["webhooks", "retry", "evt_unknown", "--url", url]) == 1
        assert "No event with this id" in capsys.readouterr().err
