"""An answer that is kept is computed again on request, and both are compared."""

from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from common.receipts.compare import NO_RECEIPT
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.idempotency.test_replay import keyed
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

ANSWER = Answer(ids(" one two three"))
BODY: dict[str, Any] = {"inputs": "Hi", "parameters": {"receipt": True, "temperature": 0.5}}


async def test_a_replay_sends_the_same_request_and_compares_all_choices(
    broker: Broker, subtests: pytest.Subtests
) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        for path, body in (
            ("/generate", BODY),
            ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 0.5, "receipt": True}),
            ("/v1/completions", {"prompt": ["a", "b"], "temperature": 0.5, "receipt": True}),
        ):
            with subtests.test(path=path):
                worker.seen.clear()
                answer = await client.post(path, json=body)
                first, worker.seen = worker.seen, []
                replayed = await client.post(f"/requests/{answer.headers['x-request-id']}/replay")
                assert replayed.status_code == 200, replayed.text
                result = replayed.json()
                assert (result["equal"], result["exact"], result["reasons"]) == (True, True, [])
                assert len(result["choices"]) == len(first)
                for old, new in zip(sorted_by_id(first), sorted_by_id(worker.seen), strict=True):
                    assert (new.prompt_ids, new.sampling) == (old.prompt_ids, old.sampling)
                    assert new.stopping == old.stopping


def sorted_by_id(requests: list[Any]) -> list[Any]:
    return sorted(requests, key=lambda request: request.request_id.partition(".")[2])


async def test_a_replay_names_the_first_difference_and_what_differs(broker: Broker, redis: Redis) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        answer = await client.post("/generate", json=BODY)
        request_id = answer.headers["x-request-id"]
        builds = '{"weights_sha256": "def"}\n'
        await redis.hset(Keys("default").request(request_id), "builds", builds)  # type: ignore[misc]
        worker.answer = lambda _: Answer(ids(" one two four"))
        result = (await client.post(f"/requests/{request_id}/replay")).json()
        assert (result["equal"], result["exact"]) == (False, False)
        [choice] = result["choices"]
        assert choice["first_difference"] == 2
        assert [choice["token"], choice["replayed_token"]] == [*ids(" three"), *ids(" four")]
        assert result["differences"] == [{"field": "weights_sha256", "then": ["def"], "now": ["abc"]}]
        assert result["reasons"] == ["weights_sha256 differs"]


async def test_an_answer_that_is_kept_without_receipt_is_replayed_too(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (_, _, client):
        answer = await client.post("/v1/completions", json={"prompt": "Hi"}, headers=keyed("k"))
        request_id = answer.json()["id"].removeprefix("cmpl-")
        result = (await client.post(f"/requests/{request_id}/replay")).json()
        assert (result["equal"], result["exact"], result["reasons"]) == (True, False, [NO_RECEIPT])


async def test_what_is_not_kept_or_has_not_finished_is_refused(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        answer = await client.post("/generate", json={"inputs": "Hi"})
        answered = answer.headers["x-request-id"]
        await wait_until(lambda: is_unknown(client, answered))  # once the gateway has deleted it
        worker.most_tokens = 1
        body = BODY | {"detached": True}
        async with client.stream("POST", "/generate_stream", json=body) as stream:
            request_id = stream.headers["x-request-id"]
            unfinished = await client.post(f"/requests/{request_id}/replay")
        worker.most_tokens = 10**6
        assert unfinished.status_code == 409
        assert "has not finished" in unfinished.json()["error"]


async def is_unknown(client: httpx.AsyncClient, request_id: str) -> bool:
    return (await client.post(f"/requests/{request_id}/replay")).status_code == 404
