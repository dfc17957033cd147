"""Promises hold beside each other while gateways, batchers and workers are killed one by one. Workers are the
real agents over an engine without a model, in this process; the others are processes.
"""

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.api_keys import IssuedKey
from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.plan import WorkerDied
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import GatewayProcesses
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.keys.issued import add_key, bearer
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import Receiver, receiving

KEYS = Keys("default")


class KilledPool:
    """The workers and batchers of a run. `kills`: by kind."""

    def __init__(self, url: str, redis: Redis, num_workers: int, step_s: float, num_blocks: int) -> None:
        self.url = url
        self.redis = redis
        self.num_workers = num_workers
        self.step_s = step_s
        self.num_blocks = num_blocks
        self.workers: dict[str, AsyncExitStack] = {}
        self.batchers: dict[str, ExitStack] = {}
        self.num_started = 0
        self.kills = Counter[str]()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for name in ("b0", "b1"):
            self.start_batcher(name)
        for _ in range(self.num_workers):
            await self.start_worker()
        try:
            yield
        finally:
            for worker in self.workers.values():
                await worker.aclose()
            for one in self.batchers.values():
                one.close()

    async def start_worker(self) -> None:
        name = f"w{self.num_started}"
        self.num_started += 1
        self.workers[name] = AsyncExitStack()
        await self.workers[name].enter_async_context(
            modeless_worker(self.url, name, num_blocks=self.num_blocks, step_s=self.step_s)
        )

    def start_batcher(self, name: str) -> None:
        self.batchers[name] = ExitStack()
        self.batchers[name].enter_context(batcher(self.url, name, WORKER_TTL_S="60", LOG_LEVEL="error"))

    async def kill_worker(self, name: str) -> None:
        """Kill a worker, wherever its tasks are. The batcher is told, as a launcher tells it."""
        await self.workers.pop(name).aclose()
        self.kills["worker"] += 1
        await self.redis.xadd(KEYS.control, {"died": encode(WorkerDied(f"{name}-1"))})
        await self.start_worker()

    async def kill_batcher(self, name: str) -> None:
        await asyncio.to_thread(self.batchers.pop(name).close)
        self.kills["batcher"] += 1
        if (await self.redis.get(KEYS.batcher) or b"").startswith(name.encode()):
            await self.redis.delete(KEYS.batcher)
        await asyncio.to_thread(self.start_batcher, name)


# --- under kills --------------------------------------------------------------------------------------------

NUM_LINES, NUM_RESPONSES, NUM_CHATS, NUM_CLIENTS = 1500, 120, 240, 4
NUM_KILLS, EVERY_S = 40, 0.8
ADMIN = "sesame"
BATCHES, CALLERS = "batches", "callers"
RUNNING = ("queued", "validating", "in_progress", "finalizing")
PATIENCE_S = 600
"""A busy machine answers ten of the lines in a second."""


def line_of(number: int) -> dict[str, Any]:
    """One of 40 chats."""
    chat = {
        "messages": [{"role": "user", "content": "Count. " * (number % 40 + 1)}],
        "max_tokens": 4 + number % 7,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": chat}


@dataclass
class Served:
    """What two tenants asked for and got.

    Attributes:
        told: ids that a webhook must tell of.
        tokens: that answers have, by tenant.
        wrong: what was not as promised.
    """

    keys: dict[str, IssuedKey]
    gateways: GatewayProcesses
    receiver: Receiver
    client: httpx.AsyncClient
    told: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def ask(self, method: str, path: str, key: IssuedKey | str, **arguments: Any) -> httpx.Response:
        """Ask one gateway after the other until one serves it."""
        headers = bearer(key) | arguments.pop("headers", {})
        for url in itertools.cycle(self.gateways.urls):
            with contextlib.suppress(httpx.TransportError):
                sent = await self.client.request(method, url + path, headers=headers, **arguments)
                if sent.status_code == 200:
                    return sent
                assert sent.status_code == 503, sent.text
            await asyncio.sleep(0.05)
        raise AssertionError

    async def post(self, path: str, tenant: str, key: str, body: dict[str, Any]) -> Any:
        """An answer to a request that is sent twice: both times it is the same one."""
        sent = [
            await self.ask("POST", path, self.keys[tenant], json=body, headers={"idempotency-key": key})
            for _ in range(2)
        ]
        answers = [one.json() for one in sent]
        if answers[0]["id"] != answers[1]["id"]:
            self.wrong.append(f"{key} was computed twice")
        return answers[0]

    async def ended(self, path: str, tenant: str) -> Any:
        """The object at `path`, when it has ended."""
        found: dict[str, Any] = {}

        async def has_ended() -> bool:
            found.update((await self.ask("GET", path, self.keys[tenant])).json())
            return found["status"] not in RUNNING

        await wait_until(has_ended, PATIENCE_S)
        return found

    async def chat(self, number: int) -> None:
        answer = await self.post(
            "/v1/chat/completions", CALLERS, f"chat-{number}", line_of(number)["body"] | {"max_tokens": 20}
        )
        self.tokens[CALLERS] += answer["usage"]["completion_tokens"]

    async def respond(self, number: int) -> None:
        body = {"input": f"Number {number}", "background": True, "max_output_tokens": 30}
        hook = {"webhook": self.receiver.hook()}
        answer = await self.post("/v1/responses", CALLERS, f"response-{number}", body | hook)
        self.told.append(answer["id"])
        found = await self.ended(f"/v1/responses/{answer['id']}", CALLERS)
        self.tokens[CALLERS] += found["usage"]["output_tokens"]

    async def batch(self) -> None:
        content = b"\n".join(json.dumps(line_of(number)).encode() for number in range(NUM_LINES))
        key = self.keys[BATCHES]
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        file = (await self.ask("POST", "/v1/files", key, **form)).json()
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "webhook": self.receiver.hook(),
        }
        asked = await self.post("/v1/batches", BATCHES, "batch-1", body)
        self.told.append(asked["id"])
        batch = await self.ended(f"/v1/batches/{asked['id']}", BATCHES)
        output = (await self.ask("GET", f"/v1/files/{batch['output_file_id']}/content", key)).text
        answers = [json.loads(line) for line in output.splitlines()]
        if [one["custom_id"] for one in answers] != [
            line_of(number)["custom_id"] for number in range(NUM_LINES)
        ]:
            self.wrong.append(f"the batch has {len(answers)} lines, or they are in another order: {batch}")
        self.tokens[BATCHES] += sum(one["response"]["body"]["usage"]["completion_tokens"] for one in answers)

    async def counted(self) -> dict[str, int]:
        groups = (await self.ask("GET", "/usage?group_by=tenant", ADMIN)).json()["data"]
        return {group["tenant"]: group["completion_tokens"] for group in groups}


@contextlib.asynccontextmanager
async def served(broker: Broker, redis: Redis, files: Path) -> AsyncIterator[tuple[Served, KilledPool]]:
    async with receiving(*[500] * 5) as receiver, httpx.AsyncClient(timeout=60) as client:
        keys = {
            BATCHES: await add_key(redis, tenant=BATCHES, service_class="batch"),
            CALLERS: await add_key(redis, tenant=CALLERS),
        }
        settings: dict[str, Any] = {
            "API_KEY": ADMIN,
            "FILES_DIR": str(files),
            "WEBHOOK_ALLOWED_HOSTS": receiver.host,
            "LOG_LEVEL": "error",
        }
        pool = KilledPool(broker.url, redis, num_workers=2, step_s=0.01, num_blocks=4000)
        with GatewayProcesses(broker.url, **settings) as gateways:
            async with pool.running():
                await gateways.until_healthy()
                yield Served(keys, gateways, receiver, client), pool


async def kill(gateways: GatewayProcesses, pool: KilledPool) -> None:
    draw = random.Random(1)
    for _ in range(NUM_KILLS):
        await asyncio.sleep(draw.uniform(0.0, 2 * EVERY_S))
        drawn = draw.random()
        if drawn < 0.4:
            await asyncio.to_thread(gateways.kill, draw.randrange(2))
        elif drawn < 0.6:
            await pool.kill_batcher(draw.choice(list(pool.batchers)))
        else:
            await pool.kill_worker(draw.choice(list(pool.workers)))


@pytest.mark.slow
@pytest.mark.timeout(1000)
async def test_promises_hold_beside_each_other(broker: Broker, tmp_path: Path) -> None:
    async with connect(broker.url) as redis, served(broker, redis, tmp_path) as (asked, pool):
        chats, responses = iter(range(NUM_CHATS)), iter(range(NUM_RESPONSES))

        async def each(numbers: Any, act: Any) -> None:
            for number in numbers:
                await act(number)

        clients: list[Coroutine[Any, Any, None]] = [
            each(*one)
            for one in ((chats, asked.chat), (responses, asked.respond))
            for _ in range(NUM_CLIENTS)
        ]
        await asyncio.gather(asked.batch(), kill(asked.gateways, pool), *clients)
        await wait_until(lambda: asked.receiver.told >= {*asked.told})
        assert await asked.counted() == dict(asked.tokens)
    events = {one.id: one.event["data"]["id"] for one in asked.receiver.deliveries}
    assert sorted(events.values()) == sorted(asked.told)
    assert not asked.wrong
    print(
        f"kills {dict(pool.kills + Counter(gateway=asked.gateways.num_kills))}; tokens {dict(asked.tokens)}"
    )
