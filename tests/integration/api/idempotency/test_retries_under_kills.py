"""Clients that send each request many times, to two gateways that are killed all the while: each request is
computed once, and all its answers are equal. RETRY_KEYS is the number of requests.
"""

import asyncio
import contextlib
import itertools
import os

import httpx
import pytest

from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_batcher import batching
from tests.support.fleet.scripted_worker import Answer, working
from tests.support.machine.killed_gateways import KilledGateways
from tests.support.tokenizer import TOKENIZER, ids

NUM_KEYS = int(os.environ.get("RETRY_KEYS", "1000"))
ANSWERS_EACH = 4
NUM_CLIENTS = 32
ANSWERS_BETWEEN_KILLS = 100


async def send_until_served(client: httpx.AsyncClient, urls: list[str], key: str, count: int) -> list[bytes]:
    """Send a request until it was answered `count` times. Returns the answers."""
    answers: list[bytes] = []
    for url in itertools.cycle(urls):
        if len(answers) == count:
            break
        with contextlib.suppress(httpx.TransportError):
            sent = await client.post(
                f"{url}/generate", json={"inputs": key}, headers={"idempotency-key": key}
            )
            if sent.status_code == 200:
                answers.append(sent.content)
            else:
                assert sent.status_code == 503, sent.text
    return answers


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_no_request_is_computed_twice(broker: Broker) -> None:
    answered = list[bytes]()
    gateways = KilledGateways(broker, ANSWERS_BETWEEN_KILLS, lambda: len(answered))
    try:
        async with (
            working(broker.url, TOKENIZER, lambda _: Answer(ids(" one two three")), step_s=0.01) as worker,
            batching(broker.url),
            httpx.AsyncClient(timeout=30) as client,
        ):
            await gateways.until_healthy()
            keys = iter(range(NUM_KEYS))

            async def send_some() -> None:
                for key in keys:
                    answers = await send_until_served(client, gateways.urls, f"key-{key}", ANSWERS_EACH)
                    assert len({*answers}) == 1
                    answered.extend(answers)

            kills = asyncio.create_task(gateways.kill_in_turns())
            await asyncio.gather(*(send_some() for _ in range(NUM_CLIENTS)))
            kills.cancel()
            assert gateways.num_kills > 2
            prompts = [request.prompt_ids for request in worker.seen]
            assert len(prompts) == len({*prompts}) == NUM_KEYS
            print(f"{len(answered)} answers of {NUM_KEYS} requests, {gateways.num_kills} kills")
    finally:
        gateways.stop()
