"""Many keys at their limits over three gateways: none ever has more than its limits."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from redis.asyncio import Redis

from common.api_keys import IssuedKey
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.keys.issued import add_key, bearer
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_until

MAX_LIVE, NUM_TOKENS = 3, 4
BODY: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}}


class Load(NamedTuple):
    num_keys: int
    num_requests: int
    num_clients: int
    """Of each key."""
    rate: int
    """Requests a minute that each key may have."""


class Watched(FakeWorker):
    """A worker that notes the most requests of each key that were live at once."""

    most: Counter[str]

    async def flush(self) -> None:
        live = Counter(one.request.key_id for one in self.live.values())
        self.most |= live
        await super().flush()


async def ask(
    clients: list[httpx.AsyncClient], key: IssuedKey, first: int, numbers: list[int]
) -> list[tuple[int, float]]:
    """Send requests one after the other, each to the next gateway. Returns status and time of each."""
    answers = []
    for number in numbers:
        client = clients[(first + number) % len(clients)]
        answer = await client.post("/generate", json=BODY, headers=bearer(key))
        answers.append((answer.status_code, time.monotonic()))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(4, 240, 5, 20), id="few"),
        pytest.param(Load(50, 10_000, 5, 60), id="ten_thousand", marks=pytest.mark.slow),
    ],
)
async def test_no_key_ever_has_more_than_its_limits(broker: Broker, redis: Redis, load: Load) -> None:
    made = [
        await add_key(redis, max_concurrent=MAX_LIVE, requests_per_minute=load.rate)
        for _ in range(load.num_keys)
    ]
    each = load.num_requests // (load.num_keys * load.num_clients)
    async with contextlib.AsyncExitStack() as stack:
        worker = Watched(broker.url, TOKENIZER, lambda _: Answer(ids(" one") * NUM_TOKENS))
        worker.most = Counter()
        await stack.enter_async_context(running(worker))
        clients = []
        for i in range(3):
            gateway, client = await stack.enter_async_context(serving(broker.url, name=f"g{i}-test"))
            await ready(gateway)
            clients.append(client)
        began_s = time.monotonic()
        asked = [
            (key, asyncio.create_task(ask(clients, key, i, [*range(each)])))
            for key in made
            for i in range(load.num_clients)
        ]
        answers: dict[str, list[tuple[int, float]]] = {key.record.key_id: [] for key in made}
        for key, task in asked:
            answers[key.record.key_id] += await task
        took_s = time.monotonic() - began_s
        statuses = Counter(status for given in answers.values() for status, _ in given)
        assert set(statuses) == {200, 429} and sum(statuses.values()) == load.num_requests
        assert max(worker.most.values()) <= MAX_LIVE
        allowed = load.rate + load.rate * took_s / 60
        served = {key_id: sum(status == 200 for status, _ in given) for key_id, given in answers.items()}
        assert max(served.values()) <= allowed, served
        print(f"{load}: {took_s:.1f} s, {statuses}, most live {max(worker.most.values())}")

        async def all_is_back() -> bool:
            return not await redis.xlen("tf:{default}:requests")

        await wait_until(all_is_back)
        for key in made:
            used = await redis.hgetall(f"tf:keys:{key.record.key_id}")  # type: ignore[misc]
            assert not [name for name in used if name.startswith(b"live:")]


@contextlib.asynccontextmanager
async def running(worker: FakeWorker) -> AsyncIterator[None]:
    await worker.open()
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await worker.redis.aclose()
