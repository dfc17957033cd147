"""Limits of an API key over several gateways: live requests, requests and tokens a minute; and what a client
is told of them.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.http.key_limits import limit_headers
from common.api_keys import ApiKey
from common.broker.request_scripts import LeftOfRates
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import KEYS
from tests.support.keys.issued import add_key, bearer, client_of
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

SHORT = {"prompt": "a", "max_tokens": 1}
Fleet = tuple[FakeWorker, list[httpx.AsyncClient]]


def body(max_new_tokens: int = 1) -> dict[str, Any]:
    return {"inputs": "a", "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": True}}


@contextlib.asynccontextmanager
async def two_gateways(broker: Broker) -> AsyncIterator[Fleet]:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(ids(" one") * 1000)) as worker,
        serving(broker.url, name="g0-test") as (first, one),
        serving(broker.url, name="g1-test") as (second, other),
    ):
        await ready(first)
        await ready(second)
        yield worker, [one, other]


async def live_of(redis: Redis, key: ApiKey) -> dict[bytes, bytes]:
    used = await redis.hgetall(KEYS.key_use(key.key_id))  # type: ignore[misc]
    return {name: value for name, value in used.items() if name.startswith(b"live:")}


async def test_a_key_has_exactly_its_live_requests_over_all_gateways(broker: Broker, redis: Redis) -> None:
    key, free = await add_key(redis, max_concurrent=3), await add_key(redis)
    async with two_gateways(broker) as (worker, clients):
        await worker.pause()
        posts = [
            asyncio.create_task(clients[i % 2].post("/generate", json=body(), headers=bearer(key)))
            for i in range(20)
        ]
        await wait_until(lambda: sum(post.done() for post in posts) == 17)
        assert await live_of(redis, key.record) == {f"live:{KEYS.places}".encode(): b"3"}
        worker.going.set()
        answers = await asyncio.gather(*posts)
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 17}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error_type"] == "rate_limit" and int(refused.headers["retry-after"]) >= 1
        assert (await clients[0].post("/generate", json=body(), headers=bearer(free))).status_code == 200

        async def has_none() -> bool:
            return not await live_of(redis, key.record)

        await wait_until(has_none)


async def test_more_choices_than_a_key_may_have_at_once_are_refused_for_that(
    broker: Broker, redis: Redis
) -> None:
    key = await add_key(redis, max_concurrent=2)
    async with two_gateways(broker) as (worker, clients):
        for more in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
            refused = await clients[0].post("/v1/completions", json=SHORT | more, headers=bearer(key))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "max_concurrent" and "3 choices" in error["message"]
        assert not worker.seen


async def test_live_requests_are_counted_anew_where_the_sum_is_lost(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, max_concurrent=2)
    async with two_gateways(broker) as (worker, clients):
        await worker.pause()
        post = asyncio.create_task(clients[0].post("/generate", json=body(), headers=bearer(key)))

        async def is_queued() -> bool:
            return bool(await redis.xlen(KEYS.requests))

        await wait_until(is_queued)
        await redis.delete(KEYS.places, KEYS.key_use(key.record.key_id))
        second = asyncio.create_task(clients[1].post("/generate", json=body(), headers=bearer(key)))

        async def both() -> bool:
            return (await live_of(redis, key.record)) == {f"live:{KEYS.places}".encode(): b"2"}

        await wait_until(both)
        refused = await clients[1].post("/generate", json=body(), headers=bearer(key))
        assert refused.status_code == 429
        worker.going.set()
        assert [(await one).status_code for one in (post, second)] == [200, 200]


async def test_requests_a_minute_are_a_burst_and_then_come_evenly(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, requests_per_minute=5)
    async with two_gateways(broker) as (_, clients):
        began_s = time.time()
        answers = [
            await clients[i % 2].post("/v1/completions", json=SHORT, headers=bearer(key)) for i in range(7)
        ]
        assert time.time() - began_s < 12, "one comes back every 12 s"
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        told = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert told == ["4", "3", "2", "1", "0", "0", "0"]
        last = answers[-1]
        assert last.headers["x-ratelimit-limit-requests"] == "5"
        assert 40 < int(last.headers["x-ratelimit-reset-requests"].removesuffix("s").replace("1m", "6")) <= 60
        assert 1 <= int(last.headers["retry-after"]) <= 12
        error = last.json()["error"]
        assert (error["code"], error["param"]) == ("rate_limit_exceeded", "requests_per_minute")
        assert key.record.key_id in error["message"] and key.text not in error["message"]
        assert "x-ratelimit-limit-tokens" not in last.headers
        use = KEYS.key_use(key.record.key_id)
        since_ms = int(await redis.hget(use, "at_ms"))  # type: ignore[misc]
        await redis.hset(use, "at_ms", str(since_ms - 13_000))  # type: ignore[misc]
        assert (await clients[0].post("/generate", json=body(), headers=bearer(key))).status_code == 200


async def test_tokens_that_were_not_needed_come_back(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, tokens_per_minute=300)
    async with two_gateways(broker) as (worker, clients):
        answer = await clients[0].post("/generate", json=body(200), headers=bearer(key))
        assert answer.status_code == 200
        num_prompt = worker.seen[-1].num_prompt
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(300 - 200 - num_prompt)
        assert (await clients[1].post("/generate", json=body(200), headers=bearer(key))).status_code == 429
        stopped = {"inputs": "a", "parameters": {"max_new_tokens": 60, "stop": [" one"]}}
        assert (await clients[1].post("/generate", json=stopped, headers=bearer(key))).status_code == 200
        left = float(await redis.hget(KEYS.key_use(key.record.key_id), "tokens"))  # type: ignore[misc]
        assert left >= 300 - 200 - 2 * num_prompt - 1


async def test_a_request_of_more_than_a_minute_takes_all_and_leaves_a_debt(
    broker: Broker, redis: Redis
) -> None:
    key = await add_key(redis, tokens_per_minute=50)
    async with two_gateways(broker) as (_, clients):
        answer = await clients[0].post("/generate", json=body(100), headers=bearer(key))
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        left = float(await redis.hget(KEYS.key_use(key.record.key_id), "tokens"))  # type: ignore[misc]
        assert left < -45
        refused = await clients[1].post("/generate", json=body(1), headers=bearer(key))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 50


async def test_choices_are_one_request_and_share_their_prompt(broker: Broker, redis: Redis) -> None:
    key = await add_key(redis, requests_per_minute=10, tokens_per_minute=1000)
    async with two_gateways(broker) as (worker, clients):
        asked = {"prompt": ["a", "b"], "n": 2, "max_tokens": 10, "temperature": 1, "stream": True}
        answer = await clients[0].post("/v1/completions", json=asked, headers=bearer(key))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        num_prompts = worker.seen[0].num_prompt + worker.seen[-1].num_prompt
        # a few tokens come back while the four choices are admitted
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert 1000 - 40 - num_prompts <= left <= 1000 - num_prompts


@pytest.mark.parametrize(
    ("limit", "left", "reset"),
    [
        (60, 59, "1s"),
        (60, 59.9, "100ms"),
        (60, 60, "0ms"),
        (10, -50, "6m0s"),
        (1, -60, "1h1m0s"),
        (60, 29.5, "31s"),
    ],
)
def test_a_reset_is_written_as_by_openai(limit: int, left: float, reset: str) -> None:
    key = ApiKey("k", "", requests_per_minute=limit)
    headers = limit_headers(key, LeftOfRates(left, 0))
    assert headers["x-ratelimit-reset-requests"] == reset


async def test_nothing_is_told_or_stored_without_keys(broker: Broker, redis: Redis) -> None:
    async with two_gateways(broker) as (_, clients):
        answer = await clients[0].post("/generate", json=body())
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert not await redis.keys("tf:keys*")
        assert client_of(redis).keys.api_keys == "tf:keys"
