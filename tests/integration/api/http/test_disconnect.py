"""Clients that disconnect: their requests are cancelled, and nothing of them is left."""

import asyncio

from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support.events import IDS, KEYS
from tests.support.fleet.gateways import answering, nothing_left
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until


async def test_requests_of_clients_that_disconnect_are_cancelled(broker: Broker) -> None:
    """They disconnect in the middle of a stream, before its first token, during a whole answer, or before any
    token was sent.
    """
    answers = {
        "text 0": Answer(IDS, ends=False),
        "text 1": Answer([], ends=False),
        "text 2": Answer(IDS, ends=False),
        "text 3": Answer(IDS, ends=False),
    }

    def answer(request: Generate) -> Answer:
        return answers[TOKENIZER.decode(unpack_ids(request.prompt_ids))]

    async def read_some() -> None:
        async with client.stream("POST", "/generate_stream", json={"inputs": "text 0"}) as response:
            async for _ in response.aiter_raw():
                return

    async with answering(broker.url, answer) as (worker, gateway, client):
        await read_some()
        for path, text in (("/generate_stream", "text 1"), ("/generate", "text 2")):
            task = asyncio.create_task(client.post(path, json={"inputs": text}))
            await wait_until(
                lambda text=text: (  # type: ignore[misc]
                    worker.seen and TOKENIZER.decode(unpack_ids(worker.seen[-1].prompt_ids)) == text
                )
            )
            task.cancel()
            await asyncio.wait([task])
        await nothing_left(gateway, worker)
        await worker.pause()
        task = asyncio.create_task(client.post("/generate", json={"inputs": "text 3"}))
        await wait_until(lambda: worker.redis.xlen(KEYS.requests))
        task.cancel()
        await wait_until(
            lambda: worker.redis.hexists(KEYS.request(list(gateway.pool.relay.streams)[-1]), "cancel")
        )
        worker.going.set()
        await wait_until(lambda: len(worker.seen) == 4)
        await nothing_left(gateway, worker)


async def test_a_cancel_is_retried_until_the_broker_accepts_it(broker: Broker) -> None:
    async with answering(broker.url, Answer(IDS, ends=False)) as (worker, gateway, client):
        task = asyncio.create_task(client.post("/generate", json={"inputs": "a"}))
        await wait_until(lambda: worker.seen)
        await worker.redis.config_set("maxmemory", 1)
        try:
            task.cancel()
            await wait_until(lambda: gateway.pool.admission.cleanups)
        finally:
            await worker.redis.config_set("maxmemory", 0)
        await nothing_left(gateway, worker)
