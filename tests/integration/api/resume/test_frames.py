"""Frames are a function of the request as admitted and of its tokens: what a gateway sends, any other renders
again byte for byte, from nothing but Redis.
"""

import asyncio
import math
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.answers.answer import HttpAnswer
from api.resume.attach import renderer_of
from api.streams.fill import Filler, Sources
from api.streams.stream import Stream
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import decode
from deploy.launcher.embedded_broker import Broker
from tests.support.answers.openai_frames import CHAT
from tests.support.fleet.gateways import answering
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids, model_tokenizer
from tests.support.waiting import wait_until

USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXT_OF_CALL = ' one\n<tool_call>\n{"name": "f", "arguments": {"text": "two é🙂 three four five"}}'
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 2}}),
    ("/", {"inputs": "Hi", "stream": True, "parameters": {"seed": 3, "do_sample": True}}),
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2} | USAGE),
    ("/v1/chat/completions", CHAT | {"stop": ["zzz", " six"], "skip_special_tokens": False}),
    ("/v1/chat/completions", CHAT | {"n": 2, "tools": TOOLS} | USAGE),
    ("/v1/chat/completions", CHAT | {"tools": TOOLS, "logprobs": True} | IDS | USAGE),
    ("/v1/completions", {"prompt": ["a é", "b"], "logprobs": 1} | IDS),
    ("/v1/completions", {"prompt": ["a é", "b"], "n": 2, "echo": True, "logprobs": 1} | USAGE),
]


async def collect(client: httpx.AsyncClient, path: str, body: dict[str, Any], seen: bytearray) -> None:
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        async for chunk in response.aiter_raw():
            seen += chunk


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_another_gateway_renders_the_same_bytes(
    broker: Broker, redis: Redis, path: str, body: dict[str, Any]
) -> None:
    text = TEXT_OF_CALL if "tools" in body else " one two é🙂 three four five"
    answer = Answer(ids(text), ends=False)
    async with answering(broker.url, answer, step_s=0.01, tool_call_parser="hermes") as (
        worker,
        gateway,
        client,
    ):
        keys = Keys(gateway.pool.settings.pool)
        seen = bytearray()
        reader = asyncio.create_task(collect(client, path, body, seen))
        await wait_until(lambda: seen.count(b"\n\n") >= 6 * len(worker.live) > 0)
        hashes = [await redis.hgetall(key) for key in await redis.keys(keys.request("*"))]  # type: ignore[misc]
        [kept] = [found[b"answer"] for found in hashes if b"answer" in found]
        described = decode(HttpAnswer, kept)
        streams = [Stream(request, model_tokenizer()) for request in described.choices()]
        by_id = {stream.request.request_id: stream for stream in streams}
        await Filler(PoolClient(redis, keys), Sources(), by_id).fill({}, dict.fromkeys(by_id, math.inf))
        rendered = b"".join(await anext(renderer_of(described).frames(described, streams)))
        reader.cancel()
    common = min(len(seen), len(rendered))
    assert rendered.count(b"\n\n") >= 6 and seen[:common] == rendered[:common]
