"""Admission through several gateways: exactly as many as the limit; jobs take no places of callers."""

import asyncio
import contextlib
import json
from collections import Counter

import httpx

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

LIMIT, NUM_POSTS, NUM_JOBS = 10, 100, 60
BODY = {"inputs": "a"}


async def test_a_hundred_posts_at_once_beside_many_jobs_get_exactly_ten_places(broker: Broker) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        clients: list[httpx.AsyncClient] = []
        for i in range(3):
            serving_one = serving(broker.url, name=f"g{i}-test", max_concurrent_requests=LIMIT)
            gateway, client = await stack.enter_async_context(serving_one)
            await ready(gateway)
            clients.append(client)
        await worker.pause()
        redis, keys = worker.redis, worker.keys
        for i in range(NUM_JOBS):
            job = {"id": f"j{i}", "inputs": "b", "parameters": {"max_new_tokens": 1}}
            await redis.xadd(keys.submit, {"job": json.dumps(job)})

        async def places(name: str) -> int:
            return int(await redis.hget(keys.places, f"requests:{name}") or 0)  # type: ignore[misc]

        async def jobs_fill_their_class() -> bool:
            return await places("batch") == LIMIT

        await wait_until(jobs_fill_their_class)
        posts = [asyncio.create_task(clients[i % 3].post("/generate", json=BODY)) for i in range(NUM_POSTS)]
        await wait_until(lambda: sum(post.done() for post in posts) == NUM_POSTS - LIMIT)
        assert (await places("standard"), await places("batch")) == (LIMIT, LIMIT)
        urgent = asyncio.create_task(clients[0].post("/generate", json=BODY, headers={"x-priority": "-1"}))

        async def urgent_is_admitted() -> bool:
            return await places("interactive") == 1

        await wait_until(urgent_is_admitted)
        worker.going.set()
        answers = await asyncio.gather(*posts, urgent)
        assert Counter(answer.status_code for answer in answers) == {200: LIMIT + 1, 429: NUM_POSTS - LIMIT}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
        for i in range(NUM_JOBS):
            await wait_until(lambda i=i: redis.exists(keys.result(f"j{i}")))  # type: ignore[misc]

        async def everything_is_back() -> bool:
            return not await redis.exists(keys.places) and not await redis.xlen(keys.requests)

        await wait_until(everything_is_back)


async def test_clients_do_not_wait_until_the_broker_has_answered_jobs(broker: Broker) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])),
        serving(broker.url) as (gateway, client),
    ):
        await ready(gateway)
        ask = gateway.pool.admission.retry_forever
        commands = [asyncio.create_task(ask(asyncio.Event().wait)) for _ in range(100)]
        try:
            assert (await client.post("/generate", json=BODY)).status_code == 200
        finally:
            for command in commands:
                command.cancel()
