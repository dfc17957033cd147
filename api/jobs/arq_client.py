"""Arq client: submits the jobs of an arq worker to the fleet, as any other service does, and waits for their
answers.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from api.event_loop import attempt, repeat_forever, retry_forever
from api.json import MAX_JSON_DEPTH
from common.broker.pool_client import PoolClient

log = logging.getLogger(__name__)

POLL_S = 0.1
LOST_CHECK_S = 2.0


class JobFailed(Exception):
    """A job that was answered with an error: `str()` is the error object of HTTP, in JSON."""


@dataclass(eq=False, slots=True)
class WaitingJob:
    """A job whose answer has not come; `entry_id` names its entry in `submit`."""

    job_id: str
    fields: dict[str, Any]
    entry_id: str
    answer: asyncio.Future[bytes]


class ArqClient:
    """Submits jobs, and polls for the answers to all of them at once.

    Attributes:
        submitted: set while jobs wait.
    """

    def __init__(self, client: PoolClient) -> None:
        self.redis: Any = client.redis
        self.keys = client.keys
        self.waiting: set[WaitingJob] = set()
        self.submitted = asyncio.Event()
        self.checked_s = 0.0

    async def run_job(self, job_id: str, content: dict[str, Any], key: Mapping[str, str]) -> Any:
        """The answer to a job; a job that was submitted before is joined. `key`: the entry's field with an
        API key, if there is one. Raises JobFailed.
        """
        try:
            fields = {"job": orjson.dumps(content | {"id": job_id}), **key}
        except TypeError as error:
            why = f"the arguments must be JSON of at most {MAX_JSON_DEPTH} levels: {error}"
            body = {"error": f"Input validation error: {why}", "error_type": "validation"}
            raise JobFailed(orjson.dumps(body).decode()) from error
        entry_id = await self.add_entry(fields)
        job = WaitingJob(job_id, fields, entry_id, asyncio.get_running_loop().create_future())
        self.waiting.add(job)
        self.submitted.set()
        try:
            result = orjson.loads(await job.answer)
        finally:
            self.waiting.remove(job)
        if "error" in result:
            raise JobFailed(orjson.dumps(result).decode())
        return result

    async def cancel(self, job_id: str, key: Mapping[str, str]) -> None:
        await self.add_entry({"cancel": job_id, **key})

    async def add_entry(self, fields: dict[str, Any]) -> str:
        """Add an entry to `submit`, once the broker answers. Returns its id."""
        entry_id: bytes = await attempt(lambda: self.redis.xadd(self.keys.submit, fields), retry_forever)
        return entry_id.decode()

    async def run(self) -> None:
        """Never returns."""
        await repeat_forever(self.poll, "polling for answers")

    async def poll(self) -> None:
        """Wait until there are jobs, then hand out the answers that have come. Every LOST_CHECK_S, submit
        jobs again that the broker has lost.
        """
        if not self.waiting:
            self.submitted.clear()
            await self.submitted.wait()
        await asyncio.sleep(POLL_S)
        waiting = list(self.waiting)
        for job, answer in zip(waiting, await self.answers(waiting), strict=True):
            if answer and not await self.has_entry(job):
                # While the entry was there, the result may have been that of another job with this id.
                [answer] = await self.answers([job])
                if answer and not job.answer.done():
                    job.answer.set_result(answer)
        if time.monotonic() - self.checked_s > LOST_CHECK_S:
            self.checked_s = time.monotonic()
            await self.submit_lost()

    async def submit_lost(self) -> None:
        """Submit jobs again that have neither an entry nor an answer."""
        for job in list(self.waiting):
            if not await self.has_entry(job) and await self.answers([job]) == [None]:
                log.warning("the broker has lost job %s: it is submitted again", job.job_id)
                job.entry_id = await self.add_entry(job.fields)

    async def has_entry(self, job: WaitingJob) -> bool:
        return bool(await self.redis.xrange(self.keys.submit, job.entry_id, job.entry_id))

    async def answers(self, jobs: list[WaitingJob]) -> list[bytes | None]:
        """The answer to each job, that to its entry first; None for no answer."""
        if not jobs:
            return []
        names = [name for job in jobs for name in (job.entry_id, job.job_id)]
        found = await self.redis.mget([self.keys.result(name) for name in names])
        return [own or shared for own, shared in zip(found[::2], found[1::2], strict=True)]
