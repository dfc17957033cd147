"""Jobs over Redis tell their ends, also those that no worker has seen."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.webhooks.test_deliveries import allowing
from tests.integration.api.webhooks.test_routes import told_by
from tests.support.fleet.scripted_worker import FakeWorker, working
from tests.support.jobs import CHAT, KEYS, answer, running_gateway
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until
from tests.support.webhooks.receiver import SECRET, Receiver, receiving


@pytest.fixture
async def receiver(broker: Broker) -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def worker(broker: Broker, receiver: Receiver) -> AsyncIterator[FakeWorker]:
    async with (
        working(broker.url, TOKENIZER, answer) as worker,
        running_gateway(broker.url, **allowing(receiver)),
    ):
        yield worker


async def submit(redis: Redis, receiver: Receiver, job_id: str, **job: Any) -> None:
    await redis.xadd(KEYS.submit, {"job": json.dumps({"id": job_id, "webhook": receiver.hook()} | job)})


async def result(redis: Redis, job_id: str) -> Any:
    return json.loads(await wait_until(lambda: redis.get(KEYS.result(job_id))))


async def test_each_end_of_a_job_is_told_once(redis: Redis, worker: FakeWorker, receiver: Receiver) -> None:
    await redis.xadd(KEYS.submit, {"cancel": "cancelled"})
    await submit(redis, receiver, "prompt", inputs="Count.")
    await submit(redis, receiver, "chat", **CHAT, parameters={"n": 2})
    await submit(redis, receiver, "faulty", inputs="Count.", prioritty=1)
    await submit(redis, receiver, "cancelled", inputs="Count.")
    await wait_until(lambda: len(receiver.deliveries) >= 4)
    assert told_by(receiver) == {
        "prompt": "job.completed",
        "chat": "job.completed",
        "faulty": "job.failed",
        "cancelled": "job.cancelled",
    }
    await submit(redis, receiver, "prompt", inputs="Count.")
    await wait_until(lambda: is_answered(redis))
    assert len(receiver.deliveries) == 4
    kept = await redis.hgetall(KEYS.job("prompt"))  # type: ignore[misc]
    assert SECRET not in str(kept)


async def is_answered(redis: Redis) -> bool:
    return not await redis.xlen(KEYS.submit) and not await redis.zcard(KEYS.webhooks)


async def test_a_webhook_at_fault_is_the_fault_of_its_job(
    redis: Redis, worker: FakeWorker, receiver: Receiver
) -> None:
    await submit(redis, receiver, "http", inputs="Count.", webhook=receiver.hook(url="http://example.org"))
    await submit(redis, receiver, "type", inputs="Count.", webhook=receiver.hook(events=["request.failed"]))
    await submit(redis, receiver, "extra", inputs="Count.", webhook=receiver.hook(secrett="a"))
    assert "`webhook.url` must begin with https:" in (await result(redis, "http"))["error"]
    assert "`webhook.events` must be some of job.completed" in (await result(redis, "type"))["error"]
    assert "`webhook.secrett`" in (await result(redis, "extra"))["error"]
    assert not receiver.deliveries and not worker.seen
