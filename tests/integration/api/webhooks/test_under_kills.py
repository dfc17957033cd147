"""Gateways, batchers and workers are killed all the while, and each response tells its end."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter

import httpx
import pytest

from common.broker.client import connect
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.killed_gateways import KilledGateways
from tests.support.machine.killed_pool import KilledPool
from tests.support.responses.events import PATH
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import Receiver, receiving

NUM_RESPONSES = 300
NUM_CLIENTS = 16
NUM_KILLS = 30
EVERY_S = 0.7


async def ask(client: httpx.AsyncClient, urls: list[str], receiver: Receiver, number: int) -> str:
    """Ask for a response until a gateway has it; return its id. Its key makes a repetition the same."""
    body = {"input": f"Number {number}", "background": True, "max_output_tokens": 30}
    headers = {"idempotency-key": f"response-{number}"}
    for url in itertools.cycle(urls):
        with contextlib.suppress(httpx.TransportError):
            sent = await client.post(url + PATH, json=body | {"webhook": receiver.hook()}, headers=headers)
            if sent.status_code == 200:
                found: str = sent.json()["id"]
                return found
        await asyncio.sleep(0.05)
    raise AssertionError


@pytest.mark.slow
async def test_each_response_tells_its_end(broker: Broker) -> None:
    """At least once on the wire, and by its id once; the first answers of the receiver are failures."""
    draw = random.Random(1)
    async with receiving(*[500] * 5) as receiver, connect(broker.url) as redis:
        settings = {"WEBHOOK_ALLOWED_HOSTS": receiver.host, "LOG_LEVEL": "error"}
        gateways = KilledGateways(broker, 0, lambda: 0, **settings)
        pool = KilledPool(broker.url, redis, num_workers=2, step_s=0.02, num_blocks=2000)
        try:
            async with pool.running(), httpx.AsyncClient(timeout=30) as client:
                await gateways.until_healthy()
                numbers, asked = iter(range(NUM_RESPONSES)), list[str]()

                async def ask_some() -> None:
                    for number in numbers:
                        asked.append(await ask(client, gateways.urls, receiver, number))
                        await asyncio.sleep(0.3)

                async def kill() -> None:
                    for _ in range(NUM_KILLS):
                        await asyncio.sleep(draw.uniform(0.0, 2 * EVERY_S))
                        drawn = draw.random()
                        if drawn < 0.5:
                            await asyncio.to_thread(gateways.kill, draw.randrange(2))
                        elif drawn < 0.7:
                            await pool.kill_batcher(draw.choice(list(pool.batchers)))
                        else:
                            await pool.kill_worker(draw.choice(list(pool.workers)))

                await asyncio.gather(kill(), *(ask_some() for _ in range(NUM_CLIENTS)))
                await wait_until(lambda: {one.event["data"]["id"] for one in receiver.deliveries} >= {*asked})
                await wait_until(lambda: is_empty(client, gateways.urls[0]))
        finally:
            gateways.stop()
    events = {one.id: one.event["data"]["id"] for one in receiver.deliveries}
    assert sorted(events.values()) == sorted(asked) and len({*asked}) == NUM_RESPONSES
    assert {*receiver.types} <= {"response.completed", "response.incomplete"}
    again = len(receiver.deliveries) - NUM_RESPONSES
    print(f"{dict(pool.kills + Counter(gateway=gateways.num_kills))} kills, {again} deliveries again")


async def is_empty(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool((await client.get(f"{url}/admin/webhooks")).json() == {"events": [], "total": 0})
    return False
