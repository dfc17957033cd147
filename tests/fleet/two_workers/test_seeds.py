"""A seed determines the answer on every route."""

import asyncio
import json
from typing import Any

import httpx
from redis.asyncio import Redis

from benchmarks.client import events
from common.broker.keys import Keys
from tests.support.fleet.http_calls import PROMPT, complete, generate, post
from tests.support.waiting import wait_until

KEYS = Keys("default")
SHORT: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
CHAT = [{"role": "user", "content": "Tell me a story."}]


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
