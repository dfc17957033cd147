"""An answer has a receipt if its client asks for one, on every route that has a place for it."""

import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.keys import Keys
from common.messages.records import pack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import EOS, Answer
from tests.support.tokenizer import ids

ANSWER = Answer(ids(" one two three"))
TEXT = [*ANSWER.ids, EOS]
FRAME = re.compile("^data: (.+)$", re.MULTILINE)
SAMPLED = {"temperature": 0.5, "receipt": True}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi", "parameters": SAMPLED}),
    ("/v1/completions", {"prompt": "Hi", **SAMPLED}),
    ("/v1/chat/completions", CHAT | SAMPLED),
    ("/v1/messages", CHAT | {"max_tokens": 20} | SAMPLED),
    ("/v1/responses", {"input": "Hi", **SAMPLED}),
]
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": SAMPLED}),
    ("/v1/completions", {"prompt": "Hi", "stream": True, **SAMPLED}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}} | SAMPLED),
    ("/v1/messages", CHAT | {"max_tokens": 20, "stream": True} | SAMPLED),
    ("/v1/responses", {"input": "Hi", "stream": True, **SAMPLED}),
]


def sha256(token_ids: list[int]) -> str:
    return hashlib.sha256(pack_ids(token_ids)).hexdigest()


def receipt_in(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (body.get("details") or body.get("response") or body)["receipt"]
    return found


async def receipt_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The receipt of an answer; in a stream only its last frame has one."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        return receipt_in(response.json())
    *before, last = [frame for frame in FRAME.findall(response.text) if frame != "[DONE]"]
    assert not any('"receipt"' in frame for frame in before)
    return receipt_in(json.loads(last))


async def test_a_receipt_shows_hashes_seed_and_who_made_the_tokens(
    broker: Broker, subtests: pytest.Subtests
) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        for path, body in (*WHOLE, *STREAMED):
            with subtests.test(path=path, streamed=(path, body) in STREAMED):
                receipt = await receipt_of(client, path, body)
                request = worker.seen[-1]
                [prompt], [choice] = receipt["prompts"], receipt["choices"]
                assert request.sampling is not None
                assert choice["seed"] == request.sampling.seed
                assert choice["sampling"]["temperature"] == 0.5
                assert prompt["sha256"] == hashlib.sha256(request.prompt_ids).hexdigest()
                assert (choice["num_tokens"], choice["sha256"]) == (len(TEXT), sha256(TEXT))
                assert receipt["builds"] == [{"weights_sha256": "abc"}]
                run = {"first_token": 0, "num_tokens": len(TEXT), "worker": worker.incarnation, "build": 0}
                assert choice["runs"] == [run]


async def test_an_answer_without_receipt_shows_and_keeps_none(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, gateway, client):
        for path, body in (*WHOLE[:4], *STREAMED[:4]):
            fields = {name: value for name, value in body.items() if name not in ("parameters", "receipt")}
            response = await client.post(path, json=fields)
            assert response.status_code == 200 and "receipt" not in response.text
        await nothing_left(gateway, worker)


async def test_a_request_with_a_receipt_is_kept_for_receipt_ttl_s(broker: Broker, redis: Redis) -> None:
    async with answering(broker.url, ANSWER, receipt_ttl_s=7200) as (_, _, client):
        await client.post("/generate", json=WHOLE[0][1])
        [key] = await redis.keys(Keys("default").request("*"))
        assert 7_000 < await redis.ttl(key) <= 7_200


async def test_where_there_is_no_place_for_a_receipt_it_is_refused(broker: Broker) -> None:
    async with answering(broker.url, ANSWER) as (worker, _, client):
        refused = [
            await client.post(
                "/vertex", json={"instances": [{"inputs": "Hi", "parameters": {"receipt": True}}]}
            ),
            await client.post(
                "/generate", json={"inputs": "Hi", "parameters": {"receipt": True, "beam_width": 2}}
            ),
        ]
        assert [(one.status_code, "`receipt`" in one.text) for one in refused] == [(422, True)] * 2
        assert not worker.seen
