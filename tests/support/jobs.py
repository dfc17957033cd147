"""What tests of jobs share: another service, clients of arq, and a gateway whose worker counts to nine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgpack
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job
from redis.asyncio import Redis

from api.app import Gateway
from api.jobs.arq_worker import ArqWorker
from common.messages.request import Generate
from common.settings.settings import Settings
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import SETTINGS, ready
from tests.support.fleet.scripted_worker import Answer
from tests.support.tokenizer import ids, model_tokenizer
from tests.support.waiting import PATIENCE_S, wait_for, wait_until

QUEUE = "tf:{default}:arq:queue"


@contextlib.asynccontextmanager
async def arq_client(url: str) -> AsyncIterator[ArqRedis]:
    pool = await create_pool(
        RedisSettings.from_dsn(url),
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
        default_queue_name=QUEUE,
    )
    try:
        yield pool
    finally:
        await pool.aclose()


async def enqueue(client: ArqRedis, *args: Any, **kwargs: Any) -> Job:
    job = await client.enqueue_job(*args, **kwargs)
    assert job is not None
    return job


async def result(job: Job) -> Any:
    return await job.result(timeout=90, poll_delay=0.05)


# --- jobs ---------------------------------------------------------------------------------------------------

IDS = ids(" zero gateway two three four five six seven eight nine")


TEXT = " zero gateway two three four five six seven eight nine"


CHAT = {"messages": [{"role": "user", "content": "Count."}]}


def answer(_: Generate) -> Answer:
    return Answer(IDS)


@contextlib.asynccontextmanager
async def running_gateway(url: str, name: str = "g0-test", **settings: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(Settings(redis_url=url, **(SETTINGS | settings)), name, model_tokenizer())
    async with gateway.running():
        await ready(gateway)
        yield gateway


@contextlib.asynccontextmanager
async def killed_gateway(url: str, name: str = "g0") -> AsyncIterator[None]:
    """A gateway. At the end of the context it ends as if it were killed."""
    gateway = Gateway(Settings(redis_url=url, **SETTINGS, worker_ttl_s=0.3), name, model_tokenizer())
    await gateway.keys.refresh()
    arq = ArqWorker(gateway.pool.client, gateway.settings)
    loops = gateway.pool.relay.run(), gateway.pool.workers.run(), gateway.job_consumer.run(), arq.consume()
    life = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        arq.finish_job = asyncio.sleep  # type: ignore[assignment]  # it would give its jobs up
        for task in life:
            task.cancel()
        await asyncio.wait(life)
        await gateway.pool.client.redis.aclose()


class Service:
    """Another service: it knows names of keys and JSON only."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.received: dict[str, list[Any]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def submit(self, api_key: str | None = None, /, **job: Any) -> str:
        """Submit a job → the id of its entry, which is the job's if it has none."""
        key: dict[Any, Any] = {} if api_key is None else {"api_key": api_key}
        entry: bytes = await self.redis.xadd(KEYS.submit, {"job": json.dumps(job)} | key)
        return entry.decode()

    async def listen(self, name: str) -> list[Any]:
        """Subscribe to a channel and return the list that its messages are put into."""
        received = self.received[name] = []
        pubsub = self.redis.pubsub()
        await pubsub.subscribe(KEYS.key(name))
        await pubsub.get_message(timeout=5)

        async def collect(received: list[Any]) -> None:
            async for message in pubsub.listen():
                received += [json.loads(message["data"])]

        self.tasks.append(asyncio.create_task(collect(received)))
        return received

    async def result(self, job_id: str, timeout_s: float = PATIENCE_S) -> Any:
        return json.loads(await wait_until(lambda: self.redis.get(KEYS.result(job_id)), timeout_s))

    async def answer(self, **job: Any) -> Any:
        """The result of a job without an id."""
        return await self.result(await self.submit(**job))

    async def stream(self, job_id: str, after: str = "0") -> list[Any]:
        return [
            json.loads(fields[b"frame"])
            for _, fields in await self.redis.xrange(KEYS.reply(job_id), f"({after}")
        ]

    async def settled(self) -> None:
        """Wait until no entry is left."""
        await wait_for(lambda: self.redis.xlen(KEYS.submit), 0)
