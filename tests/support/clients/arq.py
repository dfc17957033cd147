"""Arq, as a service uses it, and a job worker in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgpack
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job

from api.jobs.arq_worker import JobWorker
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings

KEYS = Keys("default")
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


@contextlib.asynccontextmanager
async def job_worker(url: str, **settings: Any) -> AsyncIterator[JobWorker]:
    redis = connect(url)
    running = JobWorker(PoolClient(redis, KEYS), Settings(redis_url=url, **settings))
    task = asyncio.create_task(running.main())
    try:
        yield running
    finally:
        task.cancel()
        await asyncio.wait([task])
        running.handle_sig(15)  # type: ignore[arg-type]
        await running.close()
        await redis.aclose()


async def enqueue(client: ArqRedis, *args: Any, **kwargs: Any) -> Job:
    job = await client.enqueue_job(*args, **kwargs)
    assert job is not None
    return job


async def result(job: Job) -> Any:
    return await job.result(timeout=90, poll_delay=0.05)
