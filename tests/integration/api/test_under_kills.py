"""Messages are lost and connections are cut: not a byte of a stream differs."""

import asyncio
import sys

import httpx
import pytest

from api.streams import relay as relay_module
from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import answering, nothing_left, stream
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

TEXTS = [
    "The lighthouse keeper counted the ships every evening, one by one, "
    "and wrote their names in a blue book.",
    "🙂🚀🎉 emoji party: 👩‍👩‍👧‍👦 🏳️‍🌈 and नमस्ते, आप कैसे हैं? 日本の首都は東京です。",
    "def main():\n\tpass\n\n\n   # e\u0301 \u200b end",
]


def scripted(request: Generate) -> Answer:
    """The prompt is the number of the text."""
    number = int(TOKENIZER.decode(unpack_ids(request.prompt_ids)).split()[-1])
    return Answer(TOKENIZER.encode(TEXTS[number % len(TEXTS)]).ids)


async def converse(client: httpx.AsyncClient, count: int) -> list[bytes]:
    bodies = [{"inputs": f"text {i}", "parameters": {"details": True}} for i in range(count)]
    return await asyncio.gather(*(stream(client, body) for body in bodies))


async def undisturbed(broker: Broker, count: int) -> list[bytes]:
    async with answering(broker.url, scripted) as (worker, gateway, client):
        answers = await converse(client, count)
        await nothing_left(gateway, worker)
        return answers


async def test_streams_finish_with_all_messages_lost(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(relay_module, "AUDIT_S", 0.1)
    expected = await undisturbed(broker, 3)
    async with answering(broker.url, scripted, lose=lambda: True) as (worker, gateway, client):
        assert await converse(client, 3) == expected
        await nothing_left(gateway, worker)


async def test_cut_connections_change_no_byte(broker: Broker) -> None:
    expected = await undisturbed(broker, 6)
    async with answering(broker.url, scripted, step_s=0.01) as (worker, gateway, client):
        worker.most_tokens = 5  # none ends before all have begun
        talk = asyncio.create_task(converse(client, 6))
        await wait_until(lambda: len(worker.live) == 6)
        worker.most_tokens = sys.maxsize
        for _ in range(3):
            await worker.redis.client_kill_filter(_type="pubsub")
            await wait_until(lambda: not gateway.pool.relay.subscribed.is_set())
            await wait_until(gateway.pool.relay.subscribed.is_set)
        assert await talk == expected
        await nothing_left(gateway, worker)
