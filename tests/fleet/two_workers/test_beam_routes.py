"""Beam searches of the whole fleet find what transformers finds, on every route and as jobs, whatever worker
dies meanwhile.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.engine.reference import prompt_ids, reference_beams
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, post, timeline
from tests.support.fleet.live_requests import kill_worker_of, live_requests
from tests.support.waiting import wait_until

KEYS = Keys("default")
WIDTH, NUM_TOKENS = 4, 12
BEAMS = {"beam_width": WIDTH}
CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": NUM_TOKENS}
Found = list[tuple[list[int], float]]


def expected(ids: Sequence[int]) -> Found:
    return rounded(reference_beams([ids], NUM_TOKENS, num_beams=WIDTH)[0])


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
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True} | BEAMS
    undisturbed = of_choices((await post(http, "/v1/completions", body))["choices"])
    await wait_until(lambda: fleet.workers_ready() == 2)
    asking = asyncio.create_task(post(http, "/v1/completions", body))
    [request] = await wait_until(lambda: live_requests(redis))
    await kill_worker_of(redis, request)
    assert of_choices((await asking)["choices"]) == undisturbed

    async def has_died() -> bool:
        return "died" in await timeline(http, request)

    await wait_until(has_died)
