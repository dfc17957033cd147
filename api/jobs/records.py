"""Changes of jobs: cancelling one, and trying a dead one again."""

import asyncio
from typing import Any

from api.errors import ApiError
from api.jobs import scripts as job_scripts
from api.jobs.job import Job, broker_ms
from api.jobs.scripts import (
    CANCELLED,
    DEAD,
    FAILED,
    MAX_RELEASED,
    JobEnding,
    note_job,
    note_waiting,
    release_jobs,
    retry_job,
)
from api.jobs.validated_job import drop_note, find_model, validate_job
from api.requests.pool import Pool
from common.broker.keys import request_keys
from common.process.event_loop import until_beat


async def cancel_job(pool: Pool, job_id: str, tenant: str = "") -> bool:
    """Cancel a job, at whatever gateway it runs. False if it has ended, or is not of the tenant, where one is
    given.
    """
    call = job_scripts.cancel_job(pool.client.keys, job_id, tenant=tenant)
    num_requests = await pool.client.run(call)
    for i in range(num_requests):
        await pool.admission.cancel(f"{job_id}#{i}")
    return num_requests >= 0


async def retry_dead(pool: Pool, job_id: str) -> bool:
    """Submit a dead job again, with its id. False if it is not dead."""
    keys = pool.client.keys
    num_requests = int(await pool.client.redis.hget(keys.job(job_id), "choices") or 0)  # type: ignore[misc]
    names = [f"{job_id}#{i}" for i in range(num_requests)]
    call = retry_job(keys, job_id, [*request_keys(keys, names), *map(keys.logits, names)])
    return await pool.client.run(call)


# --- records ------------------------------------------------------------------------------------------------


MAX_ERROR_CHARACTERS = 500


class JobRecords:
    """The records of the jobs that one gateway serves.

    Attributes:
        group: of consumers of `submit`.
    """

    def __init__(self, pool: Pool, group: str) -> None:
        self.pool = pool
        self.client = pool.client
        self.keys = pool.client.keys
        self.settings = pool.settings
        self.retry_forever = pool.admission.retry_forever
        self.group = group

    async def note(self, job: Job) -> str:
        """Keep the record of a registered job, and schedule one that may not run yet, unless it is faulty:
        that one is answered at once. Returns `live`, `scheduled` or `full`.
        """
        call = note_job(
            self.keys,
            job.id,
            job.entry_id,
            describe(job, self.settings.model_name),
            address=address_of(job),
            not_before_ms=job.not_before_ms if await self.must_wait(job) else 0,
            group=self.group,
            max_scheduled=self.settings.submit_limit,
        )
        return await self.retry_forever(lambda: self.client.run(call))

    async def note_waiting(self, job: Job) -> None:
        """Keep the record of a job that waits for others to end, so that people see it."""
        fields = describe(job, self.settings.model_name)
        await self.client.run(note_waiting(self.keys, job.id, job.entry_id, fields, address=address_of(job)))

    async def must_wait(self, job: Job) -> bool:
        if not job.not_before_ms:
            return False
        return job.not_before_ms > await broker_ms(self.pool) and not await is_faulty(self.pool, job)

    async def has_noted(self, job: Job) -> bool:
        """Whether a gateway has accepted this very entry before, whatever became of its API key."""
        redis: Any = self.client.redis
        name, field = self.keys.job_entries(job.id), address_of(job)
        noted: bytes | None = await self.retry_forever(lambda: redis.hget(name, field))
        return noted == job.entry_id.encode()

    async def release(self) -> None:
        """Submit scheduled jobs whose time has come, then wait for a heartbeat's time."""
        call = release_jobs(self.keys, submit_limit=self.settings.submit_limit)
        while await self.client.run(call) == MAX_RELEASED:
            pass
        await asyncio.sleep(until_beat(self.settings.heartbeat_s))


def describe(job: Job, model: str) -> dict[str, str | int]:
    """The fields of a job's record."""
    asked = job.body.model if job.body is not None else None
    return {
        "first_entry": job.first_entry_id or job.entry_id,
        "not_before_ms": job.not_before_ms,
        "kind": job.kind,
        "model": asked or model,
        "service_class": job.terms.service_class,
        "tenant": job.terms.tenant,
        "key_id": job.terms.key.key_id if job.terms.key else "",
    }


def address_of(job: Job) -> str:
    """Where the answer to an entry goes, beside `result:{id}`."""
    return f"{'stream' if job.in_stream else ''} {job.reply_to}"


async def is_faulty(pool: Pool, job: Job) -> bool:
    """Whether a job can never be served as it is."""
    try:
        await validate_job(pool, job, await find_model(pool, job))
        await drop_note(pool, job)
    except ApiError as error:
        return ending_of(error).state == FAILED
    except Exception:
        return True  # its run says so
    return False


def ending_of(error: ApiError) -> JobEnding:
    """How a job ends with an error: FAILED by its own fault; DEAD where it may be served another time."""
    if error.error_type == "cancelled":
        state = CANCELLED
    elif error.status >= 500 or error.status in (408, 424, 429):
        state = DEAD
    else:
        state = FAILED
    return JobEnding(state, error.status, error.error_type, error.text[:MAX_ERROR_CHARACTERS])
