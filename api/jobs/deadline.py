"""Deadline: what is left of the time that a job has, which counts from its entry."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from api.errors import ApiError, failed
from api.inference.pool import Pool
from api.jobs.job import Job
from api.service.terms import MAX_DEADLINE_MS
from common.messages.finish_reasons import terminal_for


def expired(job: Job) -> ApiError:
    return failed(terminal_for(job.id, "expired", 0))


async def left_ms(pool: Pool, job: Job) -> int:
    """Milliseconds by the broker's clock. Raises ApiError when none is left: the job never started."""
    if job.terms.deadline_ms is None:
        return MAX_DEADLINE_MS
    seconds, microseconds = await pool.admission.retry_forever(pool.client.redis.time)
    left = job.entry_ms + job.terms.deadline_ms - (seconds * 1000 + microseconds // 1000)
    if left <= 0:
        raise expired(job)
    return int(left)


@contextlib.asynccontextmanager
async def waiting_turn(pool: Pool, job: Job, lock: asyncio.Lock) -> AsyncIterator[None]:
    """Have the lock; raises ApiError when the job's deadline passes first."""
    try:
        async with asyncio.timeout(await left_ms(pool, job) / 1000):
            await lock.acquire()
    except TimeoutError as error:
        raise expired(job) from error
    try:
        yield
    finally:
        lock.release()
