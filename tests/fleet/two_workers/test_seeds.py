"""A seed determines the ids, whichever worker computes them, alone or in a full batch."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.client import Stream, events, stream
from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, complete, generate, post, sampled_body
from tests.support.fleet.live_requests import live_requests, worker_of
from tests.support.waiting import wait_until

KEYS = Keys("default")
SEEDED: dict[str, Any] = {
    "do_sample": True,
    "seed": 11,
    "temperature": 0.9,
    "max_new_tokens": 20,
    "ignore_eos": True,
    "details": True,
}
SHORT: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
CHAT = [{"role": "user", "content": "Tell me a story."}]
ENDLESS = 480
"""Tokens of long requests: they outlast the test, and the cache can hold all rows to their end."""


@pytest.mark.slow
async def test_a_seed_gives_the_same_ids_alone_in_full_batches_and_on_each_worker(
    fleet: Fleet, redis: Redis
) -> None:
    """All requests but the first are too long to end meanwhile; they are cancelled."""
    url, max_batch = f"{fleet.base_url}/generate_stream", fleet.settings["max_batch_size"]
    await wait_until(lambda: fleet.workers_ready() == 2)
    alone = await stream(url, {"inputs": PROMPT, "parameters": SEEDED})
    assert len(alone.ids) == SEEDED["max_new_tokens"]
    others = [asyncio.create_task(stream(url, sampled_body(i, ENDLESS))) for i in range(2 * max_batch - 2)]
    await wait_until(lambda: rows_fill(redis, max_batch - 1))
    both = [Stream(), Stream()]
    endless = {"inputs": PROMPT, "parameters": SEEDED | {"max_new_tokens": ENDLESS}}
    others += [asyncio.create_task(stream(url, endless, one)) for one in both]
    await wait_until(lambda: all(len(one.ids) >= len(alone.ids) for one in both))
    assert await rows_fill(redis, max_batch)
    assert [one.ids[: len(alone.ids)] for one in both] == [alone.ids] * 2
    assert not any(task.done() for task in others)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await wait_until(lambda: none_lives(redis))


async def rows_fill(redis: Redis, count: int) -> bool:
    """Whether each of the two workers has this number of rows."""
    workers = [await worker_of(redis, request) for request in await live_requests(redis)]
    placed = Counter(worker for worker in workers if worker)
    return sorted(placed.values()) == [count] * 2


async def none_lives(redis: Redis) -> bool:
    return not await live_requests(redis)


async def test_a_seed_gives_the_same_text_on_every_route(http: httpx.AsyncClient, redis: Redis) -> None:
    async def submitted(**job: Any) -> Any:
        entry = await redis.xadd(KEYS.submit, {"job": json.dumps(job)})
        return json.loads(await wait_until(lambda: redis.get(KEYS.result(entry.decode()))))

    async def streamed(path: str, body: dict[str, Any]) -> list[Any]:
        return [
            frame
            async for frame in events(
                f"{http.base_url}{path}".replace("//v1", "/v1"), body | {"stream": True}
            )
        ]

    tgi, openai = SHORT | {"max_new_tokens": 12}, SHORT | {"max_tokens": 12}
    prompt = (await post(http, "/chat_tokenize", {"messages": CHAT}))["templated_text"]
    completion, chat = {"prompt": PROMPT, **openai}, {"messages": CHAT, **openai}
    generated, [completed], chunks, job, [root] = await asyncio.gather(
        generate(http, **tgi),
        complete(http, **SHORT),
        streamed("/v1/completions", completion),
        submitted(inputs=PROMPT, parameters=tgi),
        post(http, "/", {"inputs": PROMPT, "parameters": tgi}),
    )
    text = generated["generated_text"]
    assert text == completed == job["generated_text"] == root["generated_text"].removeprefix(PROMPT)
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    generated, chatted, chunks, job = await asyncio.gather(
        generate(http, prompt, **tgi),
        post(http, "/v1/chat/completions", chat),
        streamed("/v1/chat/completions", chat),
        submitted(messages=CHAT, parameters=openai),
    )
    assert (
        generated["generated_text"]
        == chatted["choices"][0]["message"]["content"]
        == job["choices"][0]["message"]["content"]
        != text
    )
    assert generated["generated_text"] == "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks
    )
