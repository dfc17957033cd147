"""A job worker's way to the fleet: it submits jobs as any other service does, and waits for their answers."""

import asyncio
import logging
from typing import Any

import orjson
from redis.asyncio import Redis

from common.broker.client import ERRORS, describe_error
from common.broker.keys import Keys

log = logging.getLogger(__name__)

POLL_S = 0.1
PAUSE_S = 0.2


class JobFailed(Exception):
    """`str()` is the error object (JSON) as HTTP would give it."""


class ArqClient:
    """Submits jobs under ids of one's own. One look asks for the answers to all that wait."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis: Any = redis
        self.keys = keys
        self.waiting: dict[str, tuple[str, asyncio.Future[bytes]]] = {}

    async def ask(self, job_id: str, content: dict[str, Any]) -> Any:
        """The answer. Asking again attaches. Raises JobFailed."""
        body = orjson.dumps(content | {"id": job_id})
        entry_id = (await self.retry_forever("xadd", self.keys.submit, {"job": body})).decode()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[entry_id] = (job_id, answer)
        try:
            found = orjson.loads(await answer)
        finally:
            del self.waiting[entry_id]
        if "error" in found:
            raise JobFailed(orjson.dumps(found).decode())
        return found

    async def cancel(self, job_id: str) -> None:
        await self.retry_forever("xadd", self.keys.submit, {"cancel": job_id})

    async def retry_forever(self, command: str, *args: Any) -> Any:
        while True:
            try:
                return await getattr(self.redis, command)(*args)
            except ERRORS as error:
                log.info("once more: %s", describe_error(error))
                await asyncio.sleep(PAUSE_S)

    async def run(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.look()
            except ERRORS as error:
                log.info("cannot look for answers: %s", describe_error(error))

    async def look(self) -> None:
        """Hands out the answers that are there."""
        waiting = list(self.waiting.items())
        answers = await self.answers([(entry_id, job_id) for entry_id, (job_id, _) in waiting])
        for (entry_id, (job_id, future)), answer in zip(waiting, answers, strict=True):
            if answer and not await self.redis.xrange(self.keys.submit, entry_id, entry_id):
                # What stood there while the entry did may be the answer to another job with this id.
                [answer] = await self.answers([(entry_id, job_id)])
                if answer and not future.done():
                    future.set_result(answer)

    async def answers(self, asked: list[tuple[str, str]]) -> list[bytes | None]:
        """For each (entry, job): the answer to the entry alone, else the answer to the job."""
        if not asked:
            return []
        found = await self.redis.mget([self.keys.result(name) for pair in asked for name in pair])
        return [own or shared for own, shared in zip(found[::2], found[1::2], strict=True)]
