"""Arq client: submits the jobs of an arq worker to the fleet as any other service does, and waits for their
answers.
"""

import asyncio
import logging
from typing import Any

import orjson
from redis.asyncio import Redis

from api.retry import attempt, retry_forever
from common.broker.client import ERRORS, describe_error
from common.broker.keys import Keys

log = logging.getLogger(__name__)

POLL_S = 0.1


class JobFailed(Exception):
    """A job that was answered with an error: `str()` is the error object of HTTP, in JSON."""


class ArqClient:
    """Submits jobs under ids of its own; one poll asks for the answers to all of them.

    Attributes:
        waiting: entry id → job id and the future of the answer.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis: Any = redis
        self.keys = keys
        self.waiting: dict[str, tuple[str, asyncio.Future[bytes]]] = {}

    async def run_job(self, job_id: str, content: dict[str, Any]) -> Any:
        """The answer to a job; a job that was submitted before is joined. Raises JobFailed."""
        body = orjson.dumps(content | {"id": job_id})
        entry_id = (await self.add_entry({"job": body})).decode()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[entry_id] = (job_id, answer)
        try:
            result = orjson.loads(await answer)
        finally:
            del self.waiting[entry_id]
        if "error" in result:
            raise JobFailed(orjson.dumps(result).decode())
        return result

    async def cancel(self, job_id: str) -> None:
        await self.add_entry({"cancel": job_id})

    async def add_entry(self, fields: dict[str, Any]) -> bytes:
        """Add an entry to `submit`, however long the broker is away; its id."""
        entry_id: bytes = await attempt(lambda: self.redis.xadd(self.keys.submit, fields), retry_forever)
        return entry_id

    async def run(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.poll()
            except ERRORS as error:
                log.info("cannot poll for answers: %s", describe_error(error))

    async def poll(self) -> None:
        """Hand out the answers that have come."""
        waiting = list(self.waiting.items())
        answers = await self.answers([(entry_id, job_id) for entry_id, (job_id, _) in waiting])
        for (entry_id, (job_id, future)), answer in zip(waiting, answers, strict=True):
            if answer and not await self.redis.xrange(self.keys.submit, entry_id, entry_id):
                # While the entry was there, the result may have been that of another job with this id.
                [answer] = await self.answers([(entry_id, job_id)])
                if answer and not future.done():
                    future.set_result(answer)

    async def answers(self, jobs: list[tuple[str, str]]) -> list[bytes | None]:
        """For each (entry id, job id): the answer to the entry alone, else the answer to the job."""
        if not jobs:
            return []
        found = await self.redis.mget([self.keys.result(name) for pair in jobs for name in pair])
        return [own or shared for own, shared in zip(found[::2], found[1::2], strict=True)]
