"""Beam searches of the whole fleet find what transformers finds, on every route and as jobs, whatever worker
dies meanwhile.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import httpx
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_beams
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, post
from tests.support.waiting import wait_until

KEYS = Keys("default")
WIDTH, NUM_TOKENS = 4, 12
BEAMS = {"beam_width": WIDTH}
CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": NUM_TOKENS}
Found = list[tuple[list[int], float]]


def expected(ids: Sequence[int]) -> Found:
    return rounded(reference_beams([ids], WIDTH, NUM_TOKENS)[0])


def rounded(found: Found) -> Found:
    """Scores differ in their last digits: sums of float32 have another order."""
    return [(ids, round(score, 3)) for ids, score in found]


def of_choices(choices: list[dict[str, Any]]) -> Found:
    return rounded([(choice["token_ids"], choice["beam_score"]) for choice in choices])


def of_details(details: dict[str, Any]) -> Found:
    sequences = [details, *details["best_of_sequences"]]
    return rounded([([token["id"] for token in one["tokens"]], one["beam_score"]) for one in sequences])


async def test_ids_and_scores_equal_transformers_on_every_route(
    http: httpx.AsyncClient, redis: Redis
) -> None:
    found = expected(prompt_ids([PROMPT])[0])
    completion = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "return_token_ids": True} | BEAMS
    assert of_choices((await post(http, "/v1/completions", completion))["choices"]) == found
    chat = await post(http, "/v1/chat/completions", CHAT | BEAMS | {"return_token_ids": True})
    assert of_choices(chat["choices"]) == expected(chat["prompt_token_ids"])
    generate = {"inputs": PROMPT, "parameters": BEAMS | {"max_new_tokens": NUM_TOKENS, "details": True}}
    assert of_details((await post(http, "/generate", generate))["details"]) == found
    await redis.xadd(KEYS.submit, {"job": json.dumps({"id": "beams", **generate})})
    result = json.loads(await wait_until(lambda: redis.get(KEYS.result("beams"))))
    assert of_details(result["details"]) == found


async def test_a_killed_worker_costs_a_search_no_sequence(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "return_token_ids": True} | BEAMS
    undisturbed = of_choices((await post(http, "/v1/completions", body))["choices"])
    request_id = "1" * 32
    asking = asyncio.create_task(
        http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    )
    worker = await wait_until(lambda: redis.hget(KEYS.request(request_id), "worker"))  # type: ignore[arg-type,return-value]
    name = worker.decode().partition("-")[0]
    os.kill(await asyncio.to_thread(fleet.pid, name), signal.SIGKILL)
    assert of_choices((await asking).json()["choices"]) == undisturbed
    whole = "".join([line async for line in asyncio_lines(http, request_id)])
    assert "died" in whole


async def asyncio_lines(http: httpx.AsyncClient, request_id: str) -> Any:
    answer = await http.get(f"/fleet/requests/{request_id}")
    yield answer.text
