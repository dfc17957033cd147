"""What arq's own means do with our functions: jobs that are deferred, cron, and chains."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from arq.connections import ArqRedis
from arq.cron import CronJob, cron
from arq.jobs import Job
from arq.worker import Retry, Worker

from common.messages.records import unpack_ids
from deploy.launcher.embedded_broker import Broker
from tests.support.clients.arq import QUEUE, arq_client, enqueue, job_worker, result
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import IDS, TEXT, running_gateway
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

WAIT_S = 0.3


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    """A fleet that answers arq's jobs."""
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS)) as fake,
        running_gateway(broker.url),
        job_worker(broker.url),
    ):
        yield fake


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[ArqRedis]:
    async with arq_client(broker.url) as pool:
        yield pool


@contextlib.asynccontextmanager
async def service(
    client: ArqRedis, *functions: Any, cron_jobs: list[CronJob] | None = None
) -> AsyncIterator[None]:
    """A service's own arq worker, with a queue of its own."""
    own = Worker(
        functions,
        queue_name="service:queue",
        cron_jobs=cron_jobs,
        redis_pool=client,
        poll_delay=0.05,
        handle_signals=False,
        job_serializer=msgpack.packb,
        job_deserializer=msgpack.unpackb,
    )
    task = asyncio.create_task(own.async_run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_deferred_jobs_run_at_their_time_and_not_before(client: ArqRedis, worker: FakeWorker) -> None:
    due_s = time.time() + WAIT_S
    at = await enqueue(client, "generate", "Count.", _defer_until=datetime.fromtimestamp(due_s, UTC))
    after = await enqueue(client, "generate", "Count.", _defer_by=WAIT_S)
    for job in (at, after):
        assert (await result(job))["generated_text"] == TEXT
        info = await job.result_info()
        assert info is not None and info.start_time.timestamp() >= due_s - 0.001
    assert len(worker.seen) == 2


async def test_cron_enqueues_our_functions(client: ArqRedis, worker: FakeWorker) -> None:
    seen: list[str] = []

    async def report(ctx: dict[str, Any]) -> None:
        job = await ctx["redis"].enqueue_job("generate", "Count.", _queue_name=QUEUE)
        seen.append((await result(job))["generated_text"])

    async with service(client, cron_jobs=[cron(report, second=set(range(60)))]):
        await wait_until(lambda: seen)
    assert set(seen) == {TEXT}


async def twice(ctx: dict[str, Any], text: str) -> str:
    """Have a text continued, then what came of it, as docs/arq.md does; the first try ends in the middle."""
    for i in range(2):
        if (ctx["job_try"], i) == (1, 1):
            raise Retry
        job_id = f"{ctx['job_id']}-{i}"
        await ctx["redis"].enqueue_job("generate", text, _job_id=job_id, _queue_name=QUEUE)
        text += (await result(Job(job_id, ctx["redis"], QUEUE, msgpack.unpackb)))["generated_text"]
    return text


async def test_a_chain_that_begins_again_goes_on_with_the_results_of_its_jobs(
    client: ArqRedis, worker: FakeWorker
) -> None:
    async with service(client, twice):
        job = await enqueue(client, "twice", "Count.", _queue_name="service:queue")
        assert await result(job) == "Count." + TEXT + TEXT
    prompts = [TOKENIZER.decode(unpack_ids(request.prompt_ids)) for request in worker.seen]
    assert prompts == ["Count.", "Count." + TEXT]
