"""A killed gateway, with the real model: clients that come back have every token once, on every route."""

import asyncio
import os
import signal
from typing import Any

import orjson
from redis.asyncio import Redis

from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT
from tests.support.fleet.resuming import ResumingClient
from tests.support.sse import frames_of
from tests.support.waiting import wait_until

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 40, "ignore_eos": True}}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "ignore_eos": True, "n": 2},
    ),
]
NUM_FRAMES = (40, 41, 2 * 41 + 1)
"""Frames of each route: one a token; on /v1 also `[DONE]`, in chats also the first chunk of each choice."""


async def test_streams_go_on_at_the_other_gateway(fleet: Fleet, redis: Redis) -> None:
    requests = 2 * REQUESTS
    clients = [ResumingClient(fleet.base_url) for _ in requests]
    reads = [
        asyncio.create_task(client.read(path, body | {"stream": True, "seed": 5}))
        for client, (path, body) in zip(clients, requests, strict=True)
    ]
    await wait_until(lambda: all(client.num_frames > 3 for client in clients))
    gateways = [await redis.hget(key, "gateway") for key in await redis.keys("tf:*:request:*")]  # type: ignore[misc]
    name = next(gateway for gateway in gateways if gateway).decode().split("-")[0]
    os.kill(await asyncio.to_thread(fleet.pid, name), signal.SIGKILL)
    contents = await asyncio.gather(*reads)
    frames = [frames_of(content) for content in contents]
    assert [len(found) for found in frames] == [*2 * NUM_FRAMES]
    assert not any(ordinal for found in frames for ordinal, _ in found), "nobody asked to come back"
    texts = [[said(data) for _, data in found] for found in frames]
    assert texts[:3] == texts[3:]


def said(data: str) -> Any:
    """Strip a frame of what differs between two equal requests."""
    if data == "[DONE]":
        return data
    return {name: value for name, value in orjson.loads(data).items() if name not in ("id", "created")}
