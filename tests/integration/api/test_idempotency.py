"""A request that is sent again with its `Idempotency-Key` is computed once, whichever gateway gets it.
That each route does so shows test_routes.py.
"""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_resume import LONG, num_choices, two_gateways
from tests.support.answers import CHAT
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.keys.issued import bearer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/responses", {"input": "Hi", "store": False}),
    ("/generate", {"inputs": "Hi", "parameters": {"return_context_logits": True}}),
    ("/v1/completions", {"prompt": "a", "return_generation_logits": True}),
]
"""Answers of more than one choice, that are not stored, and with logits."""
BODY = {"inputs": "Hi"}


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


async def test_a_repetition_gets_the_same_answer_at_any_gateway(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, other):
        for number, (path, body) in enumerate(REQUESTS):
            before, headers = len(worker.seen), keyed(f"key-{number}")
            first, again = [await each.post(path, json=body, headers=headers) for each in (client, other)]
            assert (again.status_code, again.content) == (200, first.content), path
            assert again.headers["content-type"] == first.headers["content-type"]
            assert len(worker.seen) - before == num_choices(body)


async def test_the_order_of_fields_does_not_count_and_another_body_is_409(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, other):
        headers = keyed('"k1"') | {"content-type": "application/json"}
        body = b'{"inputs": "Hi", "parameters": {"seed": 1, "do_sample": true}}'
        same = b'{"parameters":{"do_sample":true,"seed":1},"inputs":"Hi"}'
        first = await client.post("/generate", content=body, headers=headers)
        again = await other.post("/generate", content=same, headers=headers | keyed("k1"))
        assert again.content == first.content
        deep = b'{"inputs": "Hi", "x": ' + b"[" * 260 + b"]" * 260 + b"}"
        refused = await client.post("/generate", content=deep, headers=headers | keyed("k2"))
        assert refused.status_code == 400 and "more than 201 levels deep" in refused.json()["error"]
        differs = await other.post("/generate", json=BODY, headers=keyed("k1"))
        other_route = await other.post("/", content=body, headers=headers)
        openai = await other.post("/v1/completions", json={"prompt": "a"}, headers=keyed("k1"))
        assert [one.status_code for one in (differs, other_route, openai)] == [409, 409, 409]
        assert "same route and body" in differs.json()["error"]
        assert openai.json()["error"]["code"] == "idempotency_key_reused"
        assert len(worker.seen) == 1


async def test_repetitions_wait_for_a_request_that_runs(broker: Broker) -> None:
    """The client that asked first has its answer, too; and if it leaves, the request goes on."""
    async with two_gateways(broker.url, LONG) as (worker, _, client, other):
        worker.most_tokens = 3
        posts = [
            asyncio.create_task(each.post("/generate", json=BODY, headers=keyed("k")))
            for each in (client, other) * 5
        ]
        await wait_until(lambda: worker.live)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json=BODY, headers=keyed("k"), timeout=0.3)
        worker.most_tokens = 10**6
        answers = await asyncio.gather(*posts)
        assert {one.status_code for one in answers} == {200} and len({one.content for one in answers}) == 1
        assert sum("idempotency-replayed" not in one.headers for one in answers) == 1
        assert len(worker.seen) == 1


async def test_a_request_whose_client_left_is_there_for_its_repetition(broker: Broker) -> None:
    async with two_gateways(broker.url, LONG) as (worker, one, client, other):
        worker.most_tokens = 3
        for path, key in (("/generate", "a"), ("/generate_stream", "b")):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(path, json=BODY, headers=keyed(key), timeout=0.3)
        worker.most_tokens = 10**6
        await wait_until(lambda: not one.pool.relay.streams)
        for path, key in (("/generate", "a"), ("/generate_stream", "b")):
            answer = await other.post(path, json=BODY, headers=keyed(key))
            assert answer.status_code == 200 and "five" in answer.text
        assert len(worker.seen) == 2


async def test_what_was_refused_or_failed_does_not_take_the_key(broker: Broker) -> None:
    script = [Answer(ids(" one two"), error="forward"), Answer(ids(" one two"))]
    async with two_gateways(broker.url, max_total_tokens=64) as (worker, _, client, other):
        worker.answer = lambda _: script[min(1, len(worker.seen) - 1)]
        invalid = await client.post("/generate", json={"inputs": ""}, headers=keyed("k"))
        failed = await client.post("/generate", json=BODY, headers=keyed("k"))
        served = await other.post("/generate", json=BODY, headers=keyed("k"))
        assert [one.status_code for one in (invalid, failed, served)] == [422, 424, 200]
        assert "idempotency-replayed" not in served.headers


async def test_a_key_belongs_to_its_tenant_and_has_a_form(broker: Broker) -> None:
    async with two_gateways(broker.url) as (worker, _, client, _):
        for tenant in ("one", "two"):
            answer = await client.post("/generate", json=BODY, headers=keyed("k") | bearer(tenant))
            assert answer.status_code == 200 and "idempotency-replayed" not in answer.headers
        assert len(worker.seen) == 2
        for wrong in ("", "a b", "x" * 256):
            refused = await client.post("/generate", json=BODY, headers=keyed(wrong))
            assert refused.status_code == 400 and "idempotency-key" in refused.json()["error"]
        assert len(worker.seen) == 2


async def test_kept_answers_are_bounded_and_expire(
    broker: Broker, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.requests.request_scripts.MAX_STORED", 2)
    async with answering(broker.url, Answer(ids(" one")), answer_ttl_s=7200) as (worker, _, client):
        for number in range(4):
            await client.post("/generate", json=BODY, headers=keyed(str(number)))
        kept = await redis.keys(Keys("default").request("*"))
        assert len(kept) == 2
        assert [7_000 < await redis.ttl(key) <= 7_200 for key in kept] == [True, True]
        newest, oldest = [
            await client.post("/generate", json=BODY, headers=keyed(number)) for number in ("3", "0")
        ]
        assert "idempotency-replayed" in newest.headers and "idempotency-replayed" not in oldest.headers
        assert len(worker.seen) == 5
