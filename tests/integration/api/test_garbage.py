"""A request leaves no garbage for a full collection, which would hold the event loop."""

import asyncio
import json
import weakref

import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids
from tests.support.waiting import wait_until

IDS = ids(" one two three four five six")
GENERATE = {"inputs": "x", "parameters": {"max_new_tokens": 40, "ignore_eos": True}}
CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 40,
    "n": 2,
    "stream": True,
    "ignore_eos": True,
}


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate_stream", GENERATE), ("/generate", GENERATE), ("/v1/chat/completions", CHAT)],
)
async def test_a_stream_is_freed_when_it_is_released(
    broker: Broker, path: str, body: dict[str, object], leaves: bool
) -> None:
    async with answering(broker.url, Answer(IDS * 10), step_s=0.02) as (worker, gateway, client):
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        data = json.dumps(body).encode()
        head = [
            f"POST {path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(data)}",
            "connection: close",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await wait_until(lambda: gateway.pool.relay.streams)
        streams = weakref.WeakSet(gateway.pool.relay.streams.values())
        if not leaves:
            await reader.read()
        writer.close()
        await nothing_left(gateway, worker)
        await wait_until(lambda: not streams)
