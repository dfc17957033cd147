"""What an answer has beside its tokens is the same when its worker dies: another one computes the rest."""

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, post, timeline
from tests.support.fleet.live_requests import kill_worker_of, live_requests
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ASKED = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "beams": {"beam_width": 4, "max_tokens": 60},
    "a seed": {"temperature": 0.9, "seed": 11},
    "logits": {"return_context_logits": True, "return_generation_logits": True},
    "log-probabilities of the prompt": {"echo": True, "logprobs": 1},
}


def numbers(choice: dict[str, Any]) -> list[float]:
    """All that is a float in a choice."""
    found: list[float] = [choice.get("beam_score") or 0.0]
    found += [one or 0.0 for one in (choice.get("logprobs") or {}).get("token_logprobs", [])]
    for name in ("context_logits", "generation_logits"):
        if name in choice:
            found += np.frombuffer(base64.b64decode(choice[name]["data"]), "<f4").tolist()
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_the_same_when_its_worker_dies(
    fleet: Fleet, http: httpx.AsyncClient, redis: Redis, kind: str
) -> None:
    body = ASKED | KINDS[kind]
    expected = (await post(http, "/v1/completions", body))["choices"]
    await wait_until(lambda: fleet.workers_ready() == 2)
    asking = asyncio.create_task(post(http, "/v1/completions", body))
    [request] = await wait_until(lambda: live_requests(redis))

    async def has(what: str) -> bool:
        return what in await timeline(http, request)

    await wait_until(lambda: has("prefilled"))
    await kill_worker_of(redis, request)
    found = (await asking)["choices"]
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=1e-3, atol=1e-3)
    await wait_until(lambda: has("died"))

    async def has_no_logits() -> bool:
        return not await redis.keys("tf:*:logits:*")

    await wait_until(has_no_logits)
